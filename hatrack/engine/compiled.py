"""A function of tensors, compiled as a whole: the forward pass, the backward pass, the update and all between them.

The rule of the step (`method.py`) is what makes it possible. The function runs once, and every operation on the way is noted
down, those of the backward pass as well: one list of plain operations, in which all that the function reads and writes
besides its inputs (parameters, buffers, data) is an input like the others. So two steps of the same form, of two seeds or
of two tasks, are one and the same list, and torch's compiler sees it once.
"""

import hashlib
import logging
import threading
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self, cast

import torch
from torch import Tensor, fx
from torch.random import fork_rng
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hatrack.engine import decompositions
from hatrack.engine.decompositions import CHANGE_LAYOUT, FORMULAS

Run = Callable[..., Tensor]
aten = torch.ops.aten
OPTIONS = {
    "fallback_random": True,  # torch's own generators: as without compiling, and a saved state holds them
    "max_pointwise_cat_inputs": 64,  # the norms of all gradients in one kernel
    "deterministic": True,  # what is chosen by a stopwatch may round otherwise the next time
    "comprehensive_padding": False,  # it makes copies of the patches of images
}
_known: dict[str, Run] = {}  # what was compiled so far, by its text
_one_at_a_time = threading.Lock()


class Compiled:
    """`Compiled(f, size)` is f, compiled for a first input of so many rows; with others f runs as it is.

    To note the operations down f has to run, and the compiled code is tried once; both are undone. `rule` is entered while
    the operations are noted down, and may end that with an error.
    """

    def __init__(self, function: Run, size: int, rule: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self.function, self.size, self.rule = function, size, rule
        self.tensors: list[Tensor] = []  # all that f uses besides its inputs
        self.run: Run | None = None
        self.tried = False

    @property
    def failed(self) -> bool:
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

    def _compile(self, inputs: tuple[Tensor, ...]) -> None:
        inputs = tuple(t.clone() for t in inputs)  # not views of something, which are other forms
        try:
            graph, written = self._capture(inputs)
            everything = [*inputs, *self.tensors]
            if any(t.is_neg() or t.is_conj() for t in everything):
                raise RuntimeError("a tensor is the negative or the conjugate of what lies in memory")
            with _one_at_a_time, torch.autocast(inputs[0].device.type, enabled=False):  # it is noted down where it was on
                text = f"{graph.code}{_form(everything)}{_results(graph)}"
                if text not in _known:
                    _known[text] = _compiled(graph, everything, text)
                with fork_rng(), restored([t for t in self.tensors if t.untyped_storage().data_ptr() in written]):
                    _known[text](*everything)
            self.run = _known[text]
        except Exception as error:  # whatever a compiler may run into, the step can do without it
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            warnings.warn(f"steps are not compiled: {reason}", stacklevel=4)

    def _capture(self, inputs: tuple[Tensor, ...]) -> tuple[fx.GraphModule, Container[int]]:
        """The operations, and the addresses of the memory that they write to. Some networks can't do with images whose
        channels are last in memory (`x.view(len(x), -1)`, `x.flatten(1).mul_(2)`): their convolutions stay as they are."""
        for table in (FORMULAS, {key: formula for key, formula in FORMULAS.items() if key not in CHANGE_LAYOUT}):
            rollback = Rollback()  # type: ignore[no-untyped-call]
            try:
                with _one_at_a_time, fork_rng(), rollback, torch.enable_grad(), self.rule():
                    graph, self.tensors = capture(self.function, inputs, table)
                if table is FORMULAS:
                    _check_copies(graph.graph)
                return graph, rollback.before
            except RuntimeError as error:
                reason = error
        raise reason


def _compiled(graph: fx.GraphModule, inputs: list[Tensor], text: str) -> Run:
    """The compiler keeps its code on the disk for other processes, by a key of its own, which says nothing of tensors that
    share memory: so the text, which does, goes into it."""
    with warnings.catch_warnings():  # the compiler's own
        warnings.simplefilter("ignore")
        from torch._guards import TracingContext, tracing
        from torch._inductor.compile_fx import compile_fx  # takes seconds to import
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        logging.getLogger("torch._inductor.select_algorithm").setLevel(logging.ERROR)  # its remarks help no user
        lists = any("_foreach_" in str(node.target) for node in graph.graph.nodes)
        options = OPTIONS | {"loop_ordering_after_fusion": not lists}  # torch 2.11 fails on operations on lists of tensors
        fake = FakeTensorMode(shape_env=ShapeEnv())  # without a ShapeEnv it keeps nothing
        forms = [fake.from_tensor(t, static_shapes=True) for t in inputs]
        key = hashlib.sha256(text.encode()).hexdigest()
        with tracing(TracingContext(fake)), torch.compiler.config.patch(cache_key_tag=key):  # type: ignore[attr-defined]
            return cast(Run, compile_fx(graph, forms, config_patches=options))


def capture(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], table: Mapping[Any, Callable[..., Any]] = FORMULAS
) -> tuple[fx.GraphModule, list[Tensor]]:
    """The operations of a call, as a function of its inputs and of all other tensors that it uses; and those tensors."""
    from torch.fx.experimental.proxy_tensor import make_fx

    try:
        module = make_fx(lambda *given: function(*given), decomposition_table=table)(*inputs)
    finally:
        decompositions.seen.clear()
    graph, tensors, places = module.graph, [], {}
    for node in reversed(graph.nodes):  # marks of the profiler, and what nobody reads
        if node.op == "call_function" and not node.users and not _matters(node):
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


def _matters(node: fx.Node) -> bool:
    """Does it write something, or draw random numbers?"""
    schema, tags = getattr(node.target, "_schema", None), getattr(node.target, "tags", ())
    return (schema is not None and any(map(writes, schema.arguments))) or torch.Tag.nondeterministic_seeded in tags


def writes(argument: Any) -> bool:
    """Is an operation's argument written to? Batch norms don't say so of their statistics."""
    told: bool = argument.alias_info is not None and argument.alias_info.is_write
    return told or argument.name in ("running_mean", "running_var")


def _check_copies(graph: fx.Graph) -> None:
    """An error if something is written to a copy that would be a view if the channels were first, and so would go on."""
    for node in graph.nodes:
        for source in _written(node):
            while _views(source):
                source = cast(fx.Node, source.args[0])
            if source.target is aten.clone.default and source.kwargs.get("memory_format") is torch.contiguous_format:
                raise RuntimeError("the step writes to a copy of images")
        if node.target is aten.as_strided.default and node.args[0].op == "call_function":
            raise RuntimeError("the step depends on how images lie in memory")


def _written(node: fx.Node) -> list[fx.Node]:
    schema = getattr(node.target, "_schema", None)
    given = zip(schema.arguments, node.args, strict=False) if schema else ()
    return [value for argument, value in given if writes(argument) and isinstance(value, fx.Node)]


def _views(node: fx.Node) -> bool:
    """Is what comes out of it the memory of its first input?"""
    schema = getattr(node.target, "_schema", None)
    return node.target is aten._unsafe_view.default or bool(schema and schema.arguments and schema.arguments[0].alias_info)


def _results(graph: fx.GraphModule) -> list[Any]:
    """The form of all that is computed, which does not follow from the text: of custom operations, by default types."""
    found = [node.meta.get("val") for node in graph.graph.nodes]
    return [(t.dtype, tuple(t.shape), t.stride()) for value in found for t in tree_leaves(value) if isinstance(t, Tensor)]


def _form(tensors: Sequence[Tensor]) -> str:
    """All that compiled code may depend on besides its text: form, place, which tensors share memory and where in it, how
    many threads there are."""
    memory = [t.untyped_storage().data_ptr() for t in tensors]
    forms = [
        (t.shape, t.stride(), t.dtype, t.device, memory.index(m), t.storage_offset(), t.data_ptr() % 16 if t.is_cuda else 0)
        for t, m in zip(tensors, memory, strict=True)
    ]
    tf32 = any(t.is_cuda for t in tensors) and torch.backends.cuda.matmul.allow_tf32
    return f"{forms} {tf32} {torch.get_num_threads()}"


# What did not happen


@contextmanager
def restored(tensors: Sequence[Tensor]) -> Iterator[None]:
    """What happens within it to these tensors is undone at its end."""
    before = [t.clone() for t in tensors]
    try:
        yield
    finally:
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old)


class Rollback(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The same for every tensor that an operation within it writes to."""

    def __enter__(self) -> Self:
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # by address: memory as bytes, and what was in it
        return cast(Self, super().__enter__())  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for memory, old in self.before.values():
                memory.copy_(old)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
        for argument in filter(writes, func._schema.arguments):
            for tensor in tree_leaves(given.get(argument.name)):
                if isinstance(tensor, Tensor):  # statistics may be None
                    self._capture(tensor)
        return func(*args, **(kwargs or {}))

    def _capture(self, tensor: Tensor) -> None:
        from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

        memory = tensor.untyped_storage()
        if memory.nbytes() and memory.data_ptr() not in self.before:
            with disable_proxy_modes_tracing():  # this is not to be noted down
                seen = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(memory)
                self.before[memory.data_ptr()] = seen, seen.clone()
