"""The operations of a module as a graph of plain torch operations, with any number of images, and edits of such graphs."""

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

aten = torch.ops.aten


def capture(module: nn.Module, example: Tensor) -> fx.GraphModule:
    """Return the operations that a module computes for images like the example, as a graph.

    Args:
        module: a module of one input and one output, in evaluation mode.
        example: images of the shape that the module takes. Their number may be another one when the graph runs.

    Returns:
        A module whose graph has operations of torch only, and whose tensors are copies.

    Raises:
        ValueError: if the operations depend on the values of the images.
    """
    fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    sizes = [DimDynamic.DYNAMIC] + [DimDynamic.STATIC] * (example.dim() - 1)
    images = torch.cat([example, example])[:2]  # a batch of one image would be taken for a constant
    try:
        with torch.no_grad(), fake:
            shaped = fake.from_tensor(images, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))
            graph = make_fx(module, tracing_mode="real", pre_dispatch=True, _allow_non_fake_inputs=True)(shaped)
    except Exception as error:  # torch raises errors of many types here
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"the network cannot be captured as a graph ({type(error).__name__}: {reason}): its operations may depend on "
            "the values of images; for_task gives a module that runs it as it is"
        ) from error
    _own_tensors(graph)
    _without_changes_in_place(graph)
    fold_constants(graph)
    return graph


def is_constant(node: Any) -> bool:
    """Return whether an argument of an operation is a tensor of the graph's module."""
    return isinstance(node, fx.Node) and node.op == "get_attr"


def constant(graph: fx.GraphModule, node: fx.Node) -> Tensor:
    """Return the tensor that a node of the graph reads."""
    value = getattr(graph, str(node.target))
    assert isinstance(value, Tensor)
    return value


def add_constant(graph: fx.GraphModule, value: Tensor, before: fx.Node) -> fx.Node:
    """Add a tensor to the graph's module.

    Args:
        graph: the module.
        value: the tensor.
        before: the node in front of which the tensor is read.

    Returns:
        The node that reads it.
    """
    number = 0
    while hasattr(graph, name := f"tensor{number}"):
        number += 1
    graph.register_buffer(name, value.detach().contiguous().clone())
    with graph.graph.inserting_before(before):
        node = graph.graph.get_attr(name)
    node.meta["val"] = value
    return node


def clean(graph: fx.GraphModule) -> None:
    """Remove operations and tensors that nothing uses, and compile the graph to Python again."""
    graph.graph.eliminate_dead_code()
    used = {node.target for node in graph.graph.find_nodes(op="get_attr")}
    for name in [*dict(graph.named_parameters()), *dict(graph.named_buffers()), *_plain_tensors(graph)]:
        if name not in used and hasattr(graph, name):
            delattr(graph, name)
    graph.recompile()


def fold_constants(graph: fx.GraphModule) -> None:
    """Compute what depends on the module's own tensors only, and keep the results in place of the operations."""
    with torch.no_grad():
        for node in list(graph.graph.nodes):
            inputs = node.all_input_nodes
            if node.op == "call_function" and inputs and all(map(is_constant, inputs)) and not _random(node):
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: constant(graph, n))
                value = node.target(*args, **kwargs)
                if isinstance(value, Tensor):
                    node.replace_all_uses_with(add_constant(graph, value, node))
                    graph.graph.erase_node(node)
    clean(graph)


def _random(node: fx.Node) -> bool:
    """Return whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _plain_tensors(graph: fx.GraphModule) -> list[str]:
    return [name for name, value in vars(graph).items() if isinstance(value, Tensor)]


def _own_tensors(graph: fx.GraphModule) -> None:
    """Replace the tensors of the graph by copies, so that later changes of the network do not reach them."""
    copies = dict[int, fx.Node]()
    for node in list(graph.graph.find_nodes(op="get_attr")):
        value = getattr(graph, str(node.target))
        if not isinstance(value, Tensor):
            raise ValueError(
                f"the network uses a {type(value).__name__}, which cannot be part of a graph; for_task gives "
                "a module that runs it as it is"
            )
        if id(value) not in copies:
            first = next(iter(graph.graph.nodes))
            copies[id(value)] = add_constant(graph, value, first)
        node.replace_all_uses_with(copies[id(value)])
    clean(graph)


def _without_changes_in_place(graph: fx.GraphModule) -> None:
    """Replace operations that write into their input, such as relu_, by those that return a new tensor."""
    order = {node: place for place, node in enumerate(graph.graph.nodes)}
    for node in list(graph.graph.nodes):
        packet, _, overload = str(node.target).removeprefix("aten.").partition(".")
        if node.op == "call_function" and packet.endswith("_") and not packet.endswith("__") and hasattr(aten, packet[:-1]):
            node.target = getattr(getattr(aten, packet[:-1]), overload)
            changed = node.args[0]
            assert isinstance(changed, fx.Node)
            later = {user for user in changed.users if order[user] > order[node]}
            changed.replace_all_uses_with(node, later.__contains__)
    graph.recompile()


def shape(node: Any) -> tuple[int, ...]:
    """Return the shape of a node's value in the graph as it was captured; the number of images is -1."""
    return tuple(size if isinstance(size, int) else -1 for size in node.meta["val"].shape)


GETITEM = operator.getitem
