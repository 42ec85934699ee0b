"""The form of a stacked step: its code, found by the operations of one run's step, and shared by all runs with the same."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx
from torch.random import fork_rng

from hatrack.engine import decompositions
from hatrack.engine.compiled import Run, capture_lock, compile_graph
from hatrack.engine.graph import capture, result_signature
from hatrack.engine.padding import Padding
from hatrack.engine.rollback import Rollback
from hatrack.engine.signature import OperationLog, settings
from hatrack.engine.stacked_decompositions import STACKED
from hatrack.engine.stacked_graph import Draw, lane_tensor, stack_graph


@dataclass
class Form:
    """A stacked step.

    Attributes:
        key: what decides its code.
        lanes: how many runs it has room for.
        code: executes it on the inputs, the draws and all other tensors, each with a leading dimension of lanes.
        draws: what every run draws before a step.
        written: which of the other tensors a step writes to.
        casts: of which of the other tensors a step needs a copy in fewer bits, and its type.
        places: by the signature of a run's step, where the other tensors are among the external ones of its log.
    """

    key: str
    lanes: int
    code: Run
    draws: list[Draw]
    written: list[bool]
    casts: list[tuple[int, torch.dtype]]
    places: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class RunStep:
    """The step of one run.

    Attributes:
        function: a function of tensors that obeys the rule of the step.
        rule: a context manager that is active while the operations are captured.
        compiled: whether the stacked step is compiled.
        paddings: returns the tensors that get more rows.
    """

    function: Callable[..., Tensor]
    rule: Callable[[], AbstractContextManager[None]]
    compiled: bool
    paddings: Callable[[], Sequence[Padding]] = tuple


_forms: dict[str, Form] = {}


def find_form(step: RunStep, inputs: tuple[Tensor, ...], lanes: int) -> tuple[Form, list[Tensor]]:
    """Return the form of a run's step, and the tensors that the step uses besides its inputs, as they are in the form.

    The step is executed once or twice, and rolled back.

    Raises:
        RuntimeError: if the step can't be stacked; its text is the reason.
    """
    log = OperationLog(inputs, STACKED)
    try:
        _execute(step, inputs, log)
    finally:
        decompositions.patch_cache.clear()
    signature = f"{log.signature()} {lanes} {step.compiled}" if log.signature() else ""
    known = next((form for form in _forms.values() if signature in form.places), None)
    tensors = [log.external[place] for place in known.places[signature]] if known else []
    if known is None:
        log.restore_grads()
        log = OperationLog(inputs, STACKED)
        known, tensors = _capture(step, inputs, lanes, log)
        if signature:
            known.places[signature] = log.places(tensors)
    return known, tensors


def _execute(step: RunStep, inputs: tuple[Tensor, ...], log: OperationLog) -> None:
    from torch.fx.experimental.proxy_tensor import disable_autocast_cache

    with capture_lock, fork_rng(), Rollback(), torch.enable_grad(), step.rule(), disable_autocast_cache():  # type: ignore[no-untyped-call]
        with log:
            result = step.function(*inputs)
        log.finish(result)


def _capture(step: RunStep, inputs: tuple[Tensor, ...], lanes: int, log: OperationLog) -> tuple[Form, list[Tensor]]:
    """Capture the step, and make its form unless the same operations have one."""
    with capture_lock, fork_rng():
        with Rollback(), torch.enable_grad(), step.rule():  # type: ignore[no-untyped-call]
            graph, tensors = capture(step.function, inputs, log)
        described = [(t.shape, t.stride(), t.dtype, t.device) for t in (*inputs, *tensors)]
        key = f"{graph.code}{described}{result_signature(graph)}{settings()} {lanes} {step.compiled}"
        if key not in _forms:
            with torch.autocast(inputs[0].device.type, enabled=False):  # the graph contains the casts of autocast
                _forms[key] = _make_form(key, graph, inputs, [t.detach() for t in tensors], lanes, compiled=step.compiled)
    return _forms[key], tensors


def _make_form(
    key: str, graph: fx.GraphModule, inputs: Sequence[Tensor], tensors: Sequence[Tensor], lanes: int, *, compiled: bool
) -> Form:
    stacked = stack_graph(graph, inputs, tensors, lanes)
    code: Run = stacked.module
    if compiled:
        draws = [draw.blank(inputs[0].device) for draw in stacked.draws]
        casts = [torch.empty_like(tensors[place], dtype=dtype) for place, dtype in stacked.casts]
        code = compile_graph(stacked.module, [lane_tensor(t, lanes) for t in (*inputs, *draws, *tensors, *casts)], key)
    return Form(key, lanes, code, stacked.draws, stacked.written, stacked.casts)
