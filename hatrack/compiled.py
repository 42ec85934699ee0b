"""A function of tensors, compiled as a whole: the forward pass, the backward pass, the update and all between them.

The rule of the step (`method.py`) is what makes it possible. The function runs once, and every operation on the way is noted
down, those of the backward pass as well: one list of plain operations, in which all that the function reads and writes
besides its inputs (parameters, buffers, data) is an input like the others. So two steps of the same form, of two seeds or
of two tasks, are one and the same list, and torch's compiler sees it once.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, fx

from hatrack import formulas
from hatrack.formulas import FORMULAS

Run = Callable[..., Tensor]
OPTIONS = {
    "fallback_random": True,  # the same random numbers as without compiling
    "max_pointwise_cat_inputs": 64,  # the norms of all gradients in one kernel
    "loop_ordering_after_fusion": False,  # in torch 2.11 it fails on updates of many weights at once
}
_known: dict[str, Run] = {}  # what was compiled so far, by its text


class Compiled:
    """`Compiled(f, size, changes)` is f, compiled for a first input of so many rows; with others f runs as it is.

    To note the operations down f has to run, which is then undone: `changes` gives the tensors that f changes.
    """

    def __init__(self, function: Callable[..., Tensor], size: int, changes: Callable[[], list[Tensor]]) -> None:
        self.function, self.size, self.changes = function, size, changes
        self.tensors: list[Tensor] = []  # all that f uses besides its inputs
        self.run: Run | None = None
        self.tried = False

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

    def _compile(self, inputs: tuple[Tensor, ...]) -> None:
        try:
            with undone(self.changes()), torch.enable_grad():
                graph, self.tensors = noted(self.function, inputs)
            everything = [*inputs, *self.tensors]
            text = f"{graph.code}{_form(everything)}"
            if text not in _known:
                _known[text] = _compiled(graph, everything)
            self.run = _known[text]
        except Exception as error:  # whatever a compiler may run into, the step can do without it
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            warnings.warn(f"steps are not compiled: {reason}", stacklevel=4)


def _compiled(graph: fx.GraphModule, inputs: list[Tensor]) -> Run:
    with warnings.catch_warnings():  # the compiler's own
        warnings.simplefilter("ignore")
        from torch._inductor.compile_fx import compile_fx  # takes seconds to import

        logging.getLogger("torch._inductor.select_algorithm").setLevel(logging.ERROR)  # its remarks help no user
        return cast(Run, compile_fx(graph, inputs, config_patches=OPTIONS))


def noted(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> tuple[fx.GraphModule, list[Tensor]]:
    """The operations of a call, as a function of its inputs and of all other tensors that it uses; and those tensors."""
    from torch.fx.experimental.proxy_tensor import make_fx

    try:
        module = make_fx(lambda *given: function(*given), decomposition_table=FORMULAS)(*inputs)
    finally:
        formulas.kept.clear()
    graph, tensors, places = module.graph, [], {}
    for node in reversed(graph.nodes):  # marks of the profiler, and what nobody reads
        if node.op == "call_function" and not node.users and not _writes(node):
            graph.erase_node(node)
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        name = str(node.target)
        if name not in places:
            with graph.inserting_after(last):
                last = places[name] = graph.placeholder(name)
            tensors.append(cast(Tensor, getattr(module, name)).detach())
            delattr(module, name)
        node.replace_all_uses_with(places[name])
        graph.erase_node(node)
    module.recompile()
    return module, tensors


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _form(tensors: Sequence[Tensor]) -> str:
    """All that a compiled function may depend on besides its text: form, place, and which tensors share their memory."""
    memory = [t.untyped_storage().data_ptr() for t in tensors]
    forms = [
        (t.shape, t.stride(), t.dtype, t.device, memory.index(m), t.data_ptr() % 16)
        for t, m in zip(tensors, memory, strict=True)
    ]
    return f"{forms} {torch.backends.cuda.matmul.allow_tf32}"


@contextmanager
def undone(tensors: Sequence[Tensor]) -> Iterator[None]:
    """What happens within it to these tensors and to torch's random generators is undone at its end."""
    gpu = any(t.is_cuda for t in tensors)
    before, cpu = [t.clone() for t in tensors], torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if gpu else None
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
        with torch.no_grad():
            for tensor, old in zip(tensors, before, strict=True):
                tensor.copy_(old)
