"""Compile a whole training step: the forward pass, the backward pass, the update of the weights and all between them.

The rule of the step (`method.py`) makes this possible. The step runs once, and every operation is captured in a graph, also
those of the backward pass. Whatever the step reads or writes besides its inputs (parameters, buffers, data) becomes an input
of the graph. So two steps with the same operations and shapes, of two seeds or of two tasks, have the same graph, which
torch's compiler translates only once.
"""

import hashlib
import logging
import threading
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.random import fork_rng
from torch.utils._pytree import tree_leaves

from hatrack.engine import decompositions
from hatrack.engine.decompositions import CHANGE_LAYOUT, DECOMPOSITIONS
from hatrack.engine.rollback import Rollback, is_written, restore_afterwards

Run = Callable[..., Tensor]
aten = torch.ops.aten
OPTIONS = {
    "fallback_random": True,  # torch's own generators, as in eager steps; checkpoints contain their state
    "max_pointwise_cat_inputs": 64,  # compute the norms of all gradients in one kernel
    "deterministic": True,  # kernels that are chosen by their measured time may round differently in the next run
    "comprehensive_padding": False,  # padding would copy the patches of images
}
_code_cache: dict[str, Run] = {}  # compiled code by its key: the text of the graph and the signature of its tensors
_lock = threading.Lock()  # torch captures and compiles in one thread at a time
_importing: list[threading.Thread] = []  # the thread that imports torch's compiler, once there is one


def import_compiler() -> None:
    """Begin to import torch's compiler, which takes seconds, in a thread; the first step that is compiled waits for it."""
    if not _importing:
        _importing.append(threading.Thread(target=_import, daemon=True))
        _importing[0].start()


def _import() -> None:
    with suppress(Exception):  # who needs it imports it again, and gets the error
        import torch._inductor.compile_fx  # noqa: F401


class Compiled:
    """A function with the same results as the given one, whose operations are compiled at the first call.

    Capturing the operations executes the function, and the compiled code is executed once as a trial. The effects of both
    are rolled back. If anything cannot be compiled, a warning gives the reason and the function runs eagerly.

    Args:
        function: a function of tensors that obeys the rule of the step.
        size: compile for a first input of this many rows; with any other size the function runs eagerly.
        rule: a context manager that is active while the operations are captured; an error that it raises prevents compiling.
    """

    def __init__(self, function: Run, size: int, rule: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self.function, self.size, self.rule = function, size, rule
        self.tensors: list[Tensor] = []  # whatever the function uses besides its inputs
        self.run: Run | None = None
        self.tried = False

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

    def _compile(self, inputs: tuple[Tensor, ...]) -> None:
        for thread in _importing:
            thread.join()
        inputs = tuple(t.clone() for t in inputs)  # a view of a larger tensor would have another signature
        try:
            graph, written = self._capture(inputs)
            arguments = [*inputs, *self.tensors]
            if any(t.is_neg() or t.is_conj() for t in arguments):
                raise RuntimeError("a tensor is a lazy negative or conjugate view of its memory")
            with _lock, torch.autocast(inputs[0].device.type, enabled=False):  # the graph contains the casts of autocast
                key = f"{graph.code}{_input_signature(arguments)}{_result_signature(graph)}"
                if key not in _code_cache:
                    _code_cache[key] = _compile_graph(graph, arguments, key)
                with fork_rng(), restore_afterwards([t for t in self.tensors if t.untyped_storage().data_ptr() in written]):
                    _code_cache[key](*arguments)
            self.run = _code_cache[key]
        except Exception as error:  # the compiler may fail in many ways; the step can always run eagerly
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            warnings.warn(f"steps are not compiled: {reason}", stacklevel=4)

    def _capture(self, inputs: tuple[Tensor, ...]) -> tuple[fx.GraphModule, Container[int]]:
        """Return the graph of the operations and the addresses of the memory that they write to.

        Some networks do not work with images whose channels are last in memory (`x.view(len(x), -1)`,
        `x.flatten(1).mul_(2)`). For them a second attempt leaves convolutions as they are.
        """
        same_layout = {op: function for op, function in DECOMPOSITIONS.items() if op not in CHANGE_LAYOUT}
        for table in (DECOMPOSITIONS, same_layout):
            rollback = Rollback()  # type: ignore[no-untyped-call]
            try:
                with _lock, fork_rng(), rollback, torch.enable_grad(), self.rule():
                    graph, self.tensors = capture(self.function, inputs, table)
                if table is DECOMPOSITIONS:
                    _check_copies(graph.graph)
                return graph, rollback.before
            except RuntimeError as error:
                reason = error
        raise reason


def _compile_graph(graph: fx.GraphModule, inputs: list[Tensor], key: str) -> Run:
    """Translate a graph with torch's compiler.

    The compiler also caches its code on disk for other processes. Its own cache key does not tell which tensors share
    memory. Ours does, so it becomes a part of the compiler's key.
    """
    with warnings.catch_warnings():  # those that the compiler itself raises
        warnings.simplefilter("ignore")
        from torch._guards import TracingContext, tracing
        from torch._inductor.compile_fx import compile_fx  # takes seconds to import
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        logging.getLogger("torch._inductor.select_algorithm").setLevel(logging.ERROR)  # its messages do not help users
        has_lists = any("_foreach_" in str(node.target) for node in graph.graph.nodes)
        options = OPTIONS | {"loop_ordering_after_fusion": not has_lists}  # torch 2.11 fails on operations on tensor lists
        fake_mode = FakeTensorMode(shape_env=ShapeEnv())  # without a ShapeEnv the cache on disk is not used
        fakes = [fake_mode.from_tensor(t, static_shapes=True) for t in inputs]
        tag = hashlib.sha256(key.encode()).hexdigest()
        with tracing(TracingContext(fake_mode)), torch.compiler.config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
            return cast(Run, compile_fx(graph, fakes, config_patches=options))


def capture(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], table: Mapping[Any, Callable[..., Any]] = DECOMPOSITIONS
) -> tuple[fx.GraphModule, list[Tensor]]:
    """Execute a function and capture its operations.

    Args:
        function: a function of tensors.
        inputs: its inputs.
        table: decompositions, by operation.

    Returns:
        The operations as a graph, whose inputs are those of the function and then all other tensors that it uses; and these
        tensors.
    """
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    # One mode for the shapes of all results. Without it torch would make a new one for every operation, with a stack trace,
    # which takes as long as all the rest.
    fake_mode = FakeTensorMode(allow_fallback_kernels=True)
    try:
        with tracing(TracingContext(fake_mode)):
            module = make_fx(lambda *given: function(*given), decomposition_table=table)(*inputs)
    finally:
        decompositions.patch_cache.clear()
    graph, tensors, placeholders = module.graph, [], {}
    for node in reversed(graph.nodes):  # remove marks of the profiler, and operations whose result is not used
        if node.op == "call_function" and not node.users and not _has_side_effect(node):
            graph.erase_node(node)
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        name = str(node.target)
        if name not in placeholders:
            with graph.inserting_after(last):
                last = placeholders[name] = graph.placeholder(name)
            tensors.append(cast(Tensor, getattr(module, name)).detach())
            delattr(module, name)
        node.replace_all_uses_with(placeholders[name])
        graph.erase_node(node)
    module.recompile()
    return module, tensors


def _has_side_effect(node: fx.Node) -> bool:
    """Return whether an operation writes to an argument or draws random numbers."""
    schema, tags = getattr(node.target, "_schema", None), getattr(node.target, "tags", ())
    return (schema is not None and any(map(is_written, schema.arguments))) or torch.Tag.nondeterministic_seeded in tags


def _check_copies(graph: fx.Graph) -> None:
    """Raise an error if the step writes to a copy that is a view in eager mode, where the channels are first.

    In eager mode later operations would see the change; here it would be lost.
    """
    for node in graph.nodes:
        for source in _written_arguments(node):
            while _returns_view(source):
                source = cast(fx.Node, source.args[0])
            if source.target is aten.clone.default and source.kwargs.get("memory_format") is torch.contiguous_format:
                raise RuntimeError("the step writes to a copy of images")
        if node.target is aten.as_strided.default and node.args[0].op == "call_function":
            raise RuntimeError("the step depends on how images lie in memory")


def _written_arguments(node: fx.Node) -> list[fx.Node]:
    schema = getattr(node.target, "_schema", None)
    given = zip(schema.arguments, node.args, strict=False) if schema else ()
    return [value for argument, value in given if is_written(argument) and isinstance(value, fx.Node)]


def _returns_view(node: fx.Node) -> bool:
    """Return whether the result of an operation shares the memory of its first argument."""
    schema = getattr(node.target, "_schema", None)
    return node.target is aten._unsafe_view.default or bool(schema and schema.arguments and schema.arguments[0].alias_info)


def _result_signature(graph: fx.GraphModule) -> list[Any]:
    """Return the type, shape and strides of all results. The text of a graph does not determine them: custom operations and
    the default type matter as well."""
    found = [node.meta.get("val") for node in graph.graph.nodes]
    return [(t.dtype, tuple(t.shape), t.stride()) for value in found for t in tree_leaves(value) if isinstance(t, Tensor)]


def _input_signature(tensors: Sequence[Tensor]) -> str:
    """Describe everything that compiled code may depend on besides the graph: shapes, strides, types and devices of its
    inputs, which of them share memory and at which offset, the precision, and the number of threads."""
    memory = [t.untyped_storage().data_ptr() for t in tensors]
    described = [
        (t.shape, t.stride(), t.dtype, t.device, memory.index(m), t.storage_offset(), t.data_ptr() % 16 if t.is_cuda else 0)
        for t, m in zip(tensors, memory, strict=True)
    ]
    tf32 = any(t.is_cuda for t in tensors) and torch.backends.cuda.matmul.allow_tf32
    return f"{described} {tf32} {torch.get_num_threads()}"
