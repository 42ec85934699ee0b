"""Capture the operations of a function in a graph, and examine the graph."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from hatrack.engine import decompositions
from hatrack.engine.decompositions import DECOMPOSITIONS
from hatrack.engine.rollback import is_written
from hatrack.engine.signature import OperationLog

aten = torch.ops.aten


def capture(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], log: OperationLog | None = None
) -> tuple[fx.GraphModule, list[Tensor]]:
    """Execute a function and capture its operations.

    Args:
        function: a function of tensors.
        inputs: its inputs.
        log: decomposes the operations and logs them; None: a new log, with all decompositions.

    Returns:
        The operations as a graph, whose inputs are those of the function and then all other tensors that it uses; and these
        tensors.
    """
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    log = log or OperationLog(inputs, DECOMPOSITIONS)

    def logged(*given: Tensor) -> Tensor:
        with log:
            result = function(*given)
        log.finish(result)
        return result

    # One mode for the shapes of all results. Without it torch would make a new one for every operation, with a stack trace,
    # which takes as long as all the rest.
    fake_mode = FakeTensorMode(allow_fallback_kernels=True)
    try:
        with tracing(TracingContext(fake_mode)):
            module = make_fx(logged)(*inputs)
    finally:
        decompositions.patch_cache.clear()
    graph, tensors, placeholders = module.graph, [], {}
    for node in reversed(graph.nodes):  # remove marks of the profiler, operations and tensors that are not used
        if node.op in ("call_function", "get_attr") and not node.users and not _has_side_effect(node):
            graph.erase_node(node)
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        name = str(node.target)
        if name not in placeholders:
            with graph.inserting_after(last):
                last = placeholders[name] = graph.placeholder(name)
            tensors.append(cast(Tensor, getattr(module, name)))
        node.replace_all_uses_with(placeholders[name])
        graph.erase_node(node)
    for name in [*module._parameters, *module._buffers]:  # code that is kept must hold no tensor of a run
        delattr(module, name)
    module.recompile()
    return module, tensors


def _has_side_effect(node: fx.Node) -> bool:
    """Return whether an operation writes to an argument or draws random numbers."""
    schema, tags = getattr(node.target, "_schema", None), getattr(node.target, "tags", ())
    return (schema is not None and any(map(is_written, schema.arguments))) or torch.Tag.nondeterministic_seeded in tags


def check_copies(graph: fx.Graph) -> None:
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


def result_signature(graph: fx.GraphModule) -> list[Any]:
    """Return the type, shape and strides of all results. The text of a graph does not determine them: custom operations and
    the default type matter as well."""
    found = [node.meta.get("val") for node in graph.graph.nodes]
    return [(t.dtype, tuple(t.shape), t.stride()) for value in found for t in tree_leaves(value) if isinstance(t, Tensor)]
