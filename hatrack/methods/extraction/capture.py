"""The operations of a module as a graph of plain torch operations, with any number of images, and edits of such graphs."""

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

aten = torch.ops.aten
SIZES = 5, 7  # numbers of images with which a network is captured


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
    graph, other = (_operations(module, example, count) for count in SIZES)
    first, second = ([(n.op, n.op == "call_function" and n.target) for n in g.graph.nodes] for g in (graph, other))
    if first != second:
        raise ValueError("the operations of the network depend on the number of images, so that they are no fixed graph")
    _with_any_number(graph, other)
    _own_tensors(graph)
    _without_changes_in_place(graph)
    fold_constants(graph)
    return graph


def _operations(module: nn.Module, example: Tensor, count: int) -> fx.GraphModule:
    """Return the operations that a module computes for so many images."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    images = example.new_zeros((count, *example.shape[1:]))
    try:
        with torch.no_grad(), fake:
            shaped = fake.from_tensor(images)
            graph = make_fx(module, tracing_mode="real", pre_dispatch=True, _allow_non_fake_inputs=True)(shaped)
    except Exception as error:  # torch raises errors of many types here
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"the network cannot be captured as a graph ({type(error).__name__}: {reason}): its operations may depend on "
            "the values of images; for_task gives a module that runs it as it is"
        ) from error
    graph.graph.eliminate_dead_code()  # a first call may read tables that a second one need not
    return graph


def _with_any_number(graph: fx.GraphModule, other: fx.GraphModule) -> None:
    """Write numbers that depend on the number of images as k n + c, found from two graphs with different numbers of images.

    `len(x)` is a plain number in a trunk's code, such as in x.reshape(len(x), -1). So a number is taken for k n + c if it
    differs between the graphs. The shape of every value is noted with -1 in the place of such numbers.
    """
    (images,) = graph.graph.find_nodes(op="placeholder")
    with graph.graph.inserting_after(images):
        count = graph.graph.call_function(aten.sym_size.int, (images, 0))
    pairs = list(zip((n for n in graph.graph.nodes if n is not count), other.graph.nodes, strict=True))
    for node, same in pairs:
        node.meta["shape"] = _shapes(node.meta.get("val"), same.meta.get("val"))

        def number(one: Any, two: Any, before: fx.Node = node) -> Any:
            if isinstance(one, list | tuple):
                return type(one)(number(a, b) for a, b in zip(one, two, strict=True))
            if type(one) is not int or one == two:
                return one
            factor = (two - one) // (SIZES[1] - SIZES[0])
            with graph.graph.inserting_before(before):
                scaled = count if factor == 1 else graph.graph.call_function(operator.mul, (count, factor))
                rest = one - factor * SIZES[0]
                return graph.graph.call_function(operator.add, (scaled, rest)) if rest else scaled

        node.args = tuple(number(one, two) for one, two in zip(node.args, same.args, strict=True))
        node.kwargs = {name: number(value, same.kwargs[name]) for name, value in node.kwargs.items()}
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _shapes(one: Any, two: Any) -> tuple[int, ...] | None:
    """Return the shape of a value of two graphs; -1 where they differ."""
    if not isinstance(one, Tensor):
        return None
    return tuple(a if a == b else -1 for a, b in zip(one.shape, two.shape, strict=True))


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
    """Return the shape of a node's value in the graph as it was captured; -1 where it depends on the number of images."""
    noted: tuple[int, ...] | None = node.meta.get("shape")
    return tuple(node.meta["val"].shape) if noted is None else noted


GETITEM = operator.getitem
