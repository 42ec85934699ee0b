"""Compile a whole training step: the forward pass, the backward pass, the update of the weights and all between them.

The rule of the step (`method.py`) makes this possible. The step runs once, and every operation is captured in a graph, also
those of the backward pass. Whatever the step reads or writes besides its inputs (parameters, buffers, data) becomes an input
of the graph. So two steps with the same operations and shapes, of two seeds or of two tasks, have the same graph, which
torch's compiler translates only once. Once there is code, a step is first executed with a log of its operations
(`signature.py`): a step with the log of an earlier one takes its code and need not be captured.
"""

import hashlib
import logging
import threading
import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.random import fork_rng

from hatrack.engine import decompositions
from hatrack.engine.decompositions import CHANGE_LAYOUT, DECOMPOSITIONS
from hatrack.engine.graph import capture, check_copies, result_signature
from hatrack.engine.helpers import is_known, remember
from hatrack.engine.padding import Padding, Widened, padded
from hatrack.engine.realized import teach_compiler
from hatrack.engine.rollback import Rollback, restore_afterwards
from hatrack.engine.signature import OperationLog, input_signature
from hatrack.registry import load

Run = Callable[..., Tensor]
OPTIONS = {
    "fallback_random": True,  # torch's own generators, as in eager steps; checkpoints contain their state
    "max_pointwise_cat_inputs": 64,  # compute the norms of all gradients in one kernel
    "deterministic": True,  # kernels that are chosen by their measured time may round differently in the next run
    "comprehensive_padding": False,  # padding would copy the patches of images
    "triton.descriptive_names": "",  # kernels with long names need launchers that a C compiler makes in every new process
    "triton.autotune_pointwise": False,  # trying block sizes takes a second in every process and makes steps no faster
}


@dataclass
class Code:
    """Compiled code.

    Attributes:
        run: executes it on the inputs of the graph: those of the step, then all other tensors.
        places: by the signature of a step that it was compiled for, where these other tensors are among the external ones of
            the step's log.
        flops: how many operations a step has as it is, by the rows of its tensors that are padded, where they were counted.
    """

    run: Run
    places: dict[str, list[int]] = field(default_factory=dict)
    flops: dict[tuple[int, ...], int | None] = field(default_factory=dict)


_code_cache: dict[str, Code] = {}  # compiled code by its key: the text of the graph and the signature of its tensors
capture_lock = threading.Lock()  # torch captures and compiles in one thread at a time
_importing: list[threading.Thread] = []  # the thread that imports torch's compiler, once there is one


def import_compiler() -> None:
    """Begin to import torch's compiler, which takes seconds, in a thread; the first step that is compiled waits for it."""
    if not _importing:
        _importing.append(threading.Thread(target=_import))  # no daemon: one in torch's C++ code aborts a process that ends
        _importing[0].start()


def _import() -> None:
    with suppress(Exception):  # who needs it imports it again, and gets the error
        load("torch._inductor.compile_fx:compile_fx")
        load("torch._inductor.codecache:torch_key")()  # a hash of torch's files, by which code on the disk is found


class Compiled:
    """A function with the same results as the given one, whose operations are compiled at the first call.

    Capturing the operations executes the function, and the compiled code is executed once as a trial. The effects of both
    are rolled back. If anything cannot be compiled, a warning gives the reason and the function runs eagerly.

    Args:
        function: a function of tensors that obeys the rule of the step.
        size: compile for a first input of this many rows; with any other size the function runs eagerly.
        rule: a context manager that is active while the operations are captured; an error that it raises prevents compiling.
        paddings: returns the tensors that get more rows, so that the code of another step fits. Until `close` they are views
            of what the code works on. If the function needs them as they are, it is compiled without.
    """

    def __init__(
        self,
        function: Run,
        size: int,
        rule: Callable[[], AbstractContextManager[None]] = nullcontext,
        paddings: Callable[[], Sequence[Padding]] = tuple,
    ) -> None:
        self.function, self.size, self.rule, self.paddings = function, size, rule, paddings
        self.widened = Widened()
        self.tensors: list[Tensor] = []  # whatever the function uses besides its inputs
        self.code: Code | None = None
        self.tried = False

    @property
    def run(self) -> Run | None:
        """The compiled code; None as long as there is none."""
        return None if self.code is None else self.code.run

    @property
    def failed(self) -> bool:
        """Whether compiling was tried without success."""
        return self.tried and self.run is None

    @torch.no_grad()
    def __call__(self, *inputs: Tensor) -> Tensor:
        whole = len(inputs[0]) == self.size
        if whole and not self.tried:
            self.tried = True
            self._compile(inputs)
        if self.run is None or not whole:
            with torch.enable_grad():
                return self.function(*inputs)
        return self.run(*inputs, *self.tensors)

    def close(self) -> None:
        """Give all tensors memory of their own. The function must not be called any more."""
        self.widened.close()
        self.tensors = []

    def _compile(self, inputs: tuple[Tensor, ...]) -> None:
        for thread in _importing:
            thread.join()
        inputs = tuple(t.clone() for t in inputs)  # a view of a larger tensor would have another signature
        paddings = self.paddings()
        reason = self._find_code(inputs, paddings)
        if reason and paddings:
            reason = self._find_code(inputs, ())
        if reason:
            warnings.warn(f"steps are not compiled: {reason}", stacklevel=4)

    def _find_code(self, inputs: tuple[Tensor, ...], paddings: Sequence[Padding]) -> str:
        """Take the code of an earlier step, or make it. Return why there can't be any; "" if there is."""
        try:
            with padded(paddings) as wide:
                if not self._reuse(inputs):
                    self._make_code(inputs)
        except Exception as error:  # the compiler may fail in many ways; the step can always run eagerly
            return (str(error).splitlines() or [type(error).__name__])[0]
        self.widened = Widened(paddings, wide)
        return ""

    def _make_code(self, inputs: tuple[Tensor, ...]) -> None:
        graph, written, signature, places = self._capture(inputs)
        arguments = [*inputs, *self.tensors]
        if any(t.is_neg() or t.is_conj() for t in arguments):
            raise RuntimeError("a tensor is a lazy negative or conjugate view of its memory")
        with (
            capture_lock,
            torch.autocast(inputs[0].device.type, enabled=False),
        ):  # the graph contains the casts of autocast
            key = f"{graph.code}{input_signature(arguments)}{result_signature(graph)}"
            if key not in _code_cache:
                _code_cache[key] = Code(compile_graph(graph, arguments, key))
            code = _code_cache[key]
            with fork_rng(), restore_afterwards([t for t in self.tensors if t.untyped_storage().data_ptr() in written]):
                code.run(*arguments)
            if signature:
                code.places[signature] = places
        self.code = code

    @contextmanager
    def _without_effects(self) -> Iterator[Rollback]:
        """Check the rule of the step in the block, and roll back the effects of its operations."""
        rollback = Rollback()  # type: ignore[no-untyped-call]
        with capture_lock, fork_rng(), rollback, torch.enable_grad(), self.rule():
            yield rollback

    def _reuse(self, inputs: tuple[Tensor, ...]) -> bool:
        """Take the code of an earlier step that executed the same operations. Return False if there is none.

        The code needs no trial: it ran with tensors of the same signature.
        """
        from torch.fx.experimental.proxy_tensor import disable_autocast_cache

        if not any(code.places for code in list(_code_cache.values())):
            return False
        log = OperationLog(inputs, DECOMPOSITIONS)
        try:
            with self._without_effects(), disable_autocast_cache():  # as while it is captured
                with log:
                    result = self.function(*inputs)
                log.finish(result)
                signature = log.signature()
        except RuntimeError:  # as the first attempt to capture it would
            signature = ""
        finally:
            decompositions.patch_cache.clear()
        code = next((code for code in list(_code_cache.values()) if signature in code.places), None)
        if code is None:
            log.restore_grads()
            return False
        self.code, self.tensors = code, [log.external[place].detach() for place in code.places[signature]]
        return True

    def _capture(self, inputs: tuple[Tensor, ...]) -> tuple[fx.GraphModule, Container[int], str, list[int]]:
        """Capture the operations in a graph.

        Some networks do not work with images whose channels are last in memory (`x.view(len(x), -1)`,
        `x.flatten(1).mul_(2)`). For them a second attempt leaves convolutions as they are.

        Returns:
            The graph, the addresses of the memory that the operations write to, the signature of the step, and the places of
            the graph's tensors in its log. The signature is "" if the log is not exact, or if it took the second attempt.
        """
        same_layout = {op: function for op, function in DECOMPOSITIONS.items() if op not in CHANGE_LAYOUT}
        for table in (DECOMPOSITIONS, same_layout):
            log = OperationLog(inputs, table)
            try:
                with self._without_effects() as rollback:
                    graph, tensors = capture(self.function, inputs, log)
                    places = log.places(tensors)
                    signature = log.signature() if table is DECOMPOSITIONS else ""
                if table is DECOMPOSITIONS:
                    check_copies(graph.graph)
                self.tensors = [t.detach() for t in tensors]
                return graph, rollback.before, signature, places
            except RuntimeError as error:
                reason = str(error)  # the error itself would hold what the step has computed with more rows
        raise RuntimeError(reason)


def compile_graph(graph: fx.GraphModule, inputs: list[Tensor], key: str) -> Run:
    """Translate a graph with torch's compiler.

    The compiler also caches its code on disk for other processes. Its own cache key does not tell which tensors share
    memory. Ours does, so it becomes a part of the compiler's key. For code that is there already the compiler starts no
    processes of its own: this process would have to wait at its end until they have ended.
    """
    with warnings.catch_warnings():  # those that the compiler itself raises
        warnings.simplefilter("ignore")
        from torch._guards import TracingContext, tracing
        from torch._inductor.compile_fx import compile_fx  # takes seconds to import
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        teach_compiler()
        logging.getLogger("torch._inductor.select_algorithm").setLevel(logging.ERROR)  # its messages do not help users
        has_lists = any("_foreach_" in str(node.target) for node in graph.graph.nodes)
        options: dict[str, Any] = OPTIONS | {"loop_ordering_after_fusion": not has_lists}  # torch 2.11 fails on tensor lists
        fake_mode = FakeTensorMode(shape_env=ShapeEnv())  # without a ShapeEnv the cache on disk is not used
        fakes = [fake_mode.from_tensor(t, static_shapes=True) for t in inputs]
        tag = hashlib.sha256(key.encode()).hexdigest()
        name = f"code {tag} {sorted(options.items())} {torch.__version__}"
        if is_known(name):
            options["compile_threads"] = 1
        with tracing(TracingContext(fake_mode)), torch.compiler.config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
            code = cast(Run, compile_fx(graph, fakes, config_patches=options))
        remember(name)
        return code
