"""Gates and norms folded into the weights before them.

y = g (W x + b) has the weights g W and g b. Batch norm in evaluation mode is such a factor and a shift per channel. A gate
that selects (`where`) sets rows to 0, whatever is in them.
"""

from typing import Any

import torch
from torch import Tensor, fx

from hatrack.methods.extraction.capture import add_constant, aten, clean, constant, is_constant

CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
AFFINE = (aten.linear.default, *CONVOLUTIONS)  # layers whose first dimension of weights is the channels of the result
NORMS = (aten.batch_norm.default, aten.layer_norm.default, aten.group_norm.default, aten.instance_norm.default)
SAME = (aten.dropout.default, aten.alpha_dropout.default, aten.feature_dropout.default)  # in evaluation mode
SELECT = (aten.where.ScalarOther, aten.where.self)


@torch.no_grad()
def fold(graph: fx.GraphModule) -> None:
    """Fold gates and batch norms into the layers before them, and remove operations that do nothing."""
    for node in list(graph.graph.nodes):
        if node.target in SAME and not node.args[2]:
            _bypass(graph, node, node.args[0])
    for node in list(graph.graph.nodes):
        if node.target == aten.batch_norm.default and not node.args[5]:
            _fold_batch_norm(graph, node)
        elif node.target in SELECT or node.target == aten.mul.Tensor:
            _fold_gate(graph, node)
    clean(graph)


def gate_of(graph: fx.GraphModule, node: fx.Node) -> tuple[fx.Node, Tensor] | None:
    """Return what an operation gates and the gates, if it selects by a constant (other values become 0) or multiplies by
    one; None if it does not."""
    args: Any = node.args
    if node.target in SELECT and is_constant(args[0]) and isinstance(args[1], fx.Node):
        other = constant(graph, args[2]) if is_constant(args[2]) else args[2]
        zero = not isinstance(other, fx.Node) and not torch.as_tensor(other).any()
        return (args[1], constant(graph, args[0])) if zero and not is_constant(args[1]) else None
    if node.target == aten.mul.Tensor and is_constant(args[0]) != is_constant(args[1]):
        x, gates = args if is_constant(args[1]) else args[::-1]
        return (x, constant(graph, gates)) if isinstance(x, fx.Node) else None
    return None


def _fold_gate(graph: fx.GraphModule, node: fx.Node) -> None:
    """Fold a gate per channel into the layer or norm whose result it gates, if nothing else uses that result."""
    found = gate_of(graph, node)
    if found is None:
        return
    layer, gates = found
    channels = _channels(graph, layer)
    if channels is None or len(layer.users) > 1 or not _per_channel(layer, gates, channels):
        return
    gates = gates.reshape(-1).expand(channels)
    _scale(graph, layer, gates, None)
    _bypass(graph, node, layer)


def _channels(graph: fx.GraphModule, node: fx.Node) -> int | None:
    """Return how many channels a layer or norm with weights of its own has; None if the node is neither."""
    places: dict[Any, int] = {**dict.fromkeys(AFFINE, 1), aten.batch_norm.default: 1, aten.layer_norm.default: 2}
    place = places.get(node.target)
    if place is None or len(node.args) <= place or not is_constant(node.args[place]):
        return None
    if node.target == aten.layer_norm.default and len(node.args[1]) != 1:  # type: ignore[arg-type]
        return None
    return constant(graph, node.args[place]).shape[0]  # type: ignore[arg-type]


def _per_channel(layer: fx.Node, gates: Tensor, channels: int) -> bool:
    """Return whether gates have one value for all channels, or one for each of them along their dimension."""
    rank = layer.meta["val"].dim()
    at = rank - 1 if layer.target in (aten.linear.default, aten.layer_norm.default) else 1
    full = (1,) * (rank - gates.dim()) + tuple(gates.shape)
    return len(full) == rank and all(size == 1 or (d == at and size == channels) for d, size in enumerate(full))


def _scale(graph: fx.GraphModule, layer: fx.Node, gates: Tensor, shift: Tensor | None) -> None:
    """Multiply the weights and biases of a layer by a value per channel (bools select), then add a shift to the biases."""
    place = 2 if layer.target == aten.layer_norm.default else 1
    args = list(layer.args) + [None] * (place + 2 - len(layer.args))
    for at in (place, place + 1):
        if not is_constant(args[at]):
            continue
        value = constant(graph, args[at])  # type: ignore[arg-type]
        own = gates.view(-1, *[1] * (value.dim() - 1))
        value = torch.where(own, value, 0) if own.dtype == torch.bool else value * own.to(value.dtype)
        args[at] = add_constant(graph, value, layer)
    if shift is not None:
        bias = constant(graph, args[place + 1]) if is_constant(args[place + 1]) else 0  # type: ignore[arg-type]
        args[place + 1] = add_constant(graph, bias + shift, layer)
    layer.args = tuple(args)


def _fold_batch_norm(graph: fx.GraphModule, node: fx.Node) -> None:
    """Fold a batch norm in evaluation mode into the layer before it, if nothing else uses that layer's result."""
    layer, *tensors = node.args[:5]
    momentum_and_eps: Any = node.args[6:8]
    if not isinstance(layer, fx.Node) or layer.target not in AFFINE or len(layer.users) > 1:
        return
    if not is_constant(layer.args[1]) or (layer.target == aten.linear.default and layer.meta["val"].dim() != 2):
        return
    weight, bias, mean, variance = (constant(graph, t).double() if is_constant(t) else None for t in tensors)  # type: ignore[arg-type]
    assert mean is not None
    assert variance is not None
    factor = (variance + momentum_and_eps[1]).rsqrt() * (1 if weight is None else weight)
    kind = constant(graph, layer.args[1]).dtype  # type: ignore[arg-type]
    shift = (0 if bias is None else bias) - mean * factor
    _scale(graph, layer, factor.to(kind), shift.to(kind))
    _bypass(graph, node, layer)


def _bypass(graph: fx.GraphModule, node: fx.Node, source: Any) -> None:
    """Remove an operation: what used its result uses another."""
    node.replace_all_uses_with(source)
    graph.graph.erase_node(node)
