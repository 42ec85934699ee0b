"""The rules of operations on each channel by itself, or on the same channels of two values. See `analysis.py`."""

from typing import Any

import torch
from torch import Tensor, fx

from hatrack.methods.extraction.analysis import Analysis, Found, Rules, arguments, only_zeros, operation, rules_in, unknown
from hatrack.methods.extraction.capture import GETITEM, aten, constant, is_constant, shape
from hatrack.methods.extraction.folding import gate_of
from hatrack.methods.extraction.labels import UNKNOWN, Channels

RULES: Rules = {}
rule = rules_in(RULES)


@rule(aten.relu.default, aten.gelu.default, aten.silu.default, aten.tanh.default, aten.sigmoid.default, aten.elu.default,
      aten.leaky_relu.default, aten.hardswish.default, aten.hardsigmoid.default, aten.hardtanh.default, aten.relu6.default,
      aten.softplus.default, aten.mish.default, aten.selu.default, aten.celu.default, aten.log_sigmoid.default,
      aten.exp.default, aten.neg.default, aten.abs.default, aten.square.default, aten.pow.Tensor_Scalar, aten.erf.default,
      aten.clamp.default, aten.clamp_min.default, aten.sqrt.default, aten.sin.default, aten.cos.default)  # fmt: skip
def pointwise(own: Analysis, node: fx.Node) -> Found:
    """A function of single numbers: a constant channel stays constant."""
    channels = own.channels(arguments(node)[0])
    if channels is None or len(node.all_input_nodes) > 1:
        own.pin_inputs(node)
        return None
    values = operation(node)(channels.values, *arguments(node)[1:], **node.kwargs)
    return channels._replace(values=torch.where(channels.known(), values, UNKNOWN))


@rule(aten.contiguous.default, aten.clone.default, aten.detach.default, aten.alias.default, aten.to.dtype)
def unchanged(own: Analysis, node: fx.Node) -> Found:
    """The same numbers again."""
    return own.channels(arguments(node)[0])


@rule(aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default, aten.adaptive_avg_pool1d.default,
      aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default, aten.avg_pool1d.default, aten.avg_pool2d.default,
      aten.avg_pool3d.default, aten.adaptive_max_pool1d.default, aten.adaptive_max_pool2d.default,
      aten.upsample_nearest2d.vec, aten.upsample_bilinear2d.vec, aten.constant_pad_nd.default, aten.pad.default)  # fmt: skip
def pool(own: Analysis, node: fx.Node) -> Found:
    """Pooling and padding of each channel by itself. Zeros stay zeros, but for padding with other values."""
    channels = own.channels(arguments(node)[0])
    if channels is None:
        return None
    one = len(shape(arguments(node)[0])) - channels.dim if channels.dim == 1 else 0  # dimensions from the channels on
    pads = node.target in (aten.constant_pad_nd.default, aten.pad.default)
    if channels.dim != 1 or (pads and (len(arguments(node)[1]) // 2 >= one or any(arguments(node)[2:]))):
        own.pin(channels)
        return None
    result = channels._replace(values=only_zeros(channels.values))
    several = isinstance(node.meta["val"], tuple | list)
    return [result] * len(node.meta["val"]) if several else result


@rule(aten.softmax.int, aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.log_softmax.int)
def reduce(own: Analysis, node: fx.Node) -> Found:
    """A sum, mean or softmax over other dimensions than that of the channels."""
    channels, dims = own.channels(arguments(node)[0]), arguments(node)[1] if len(node.args) > 1 else None
    if channels is None:
        return None
    rank = len(shape(arguments(node)[0]))
    over = {d % rank for d in ([dims] if isinstance(dims, int) else dims or range(rank))}
    if channels.dim in over:
        own.pin(channels)
        return None
    keeps = len(shape(node)) == rank
    dim = channels.dim if keeps else channels.dim - sum(d < channels.dim for d in over)
    soft = node.target in (aten.softmax.int, aten.log_softmax.int)
    return Channels(dim, channels.labels, unknown(len(channels.values)) if soft else only_zeros(channels.values))


@rule(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.where.ScalarOther, aten.where.self,
      aten.maximum.default, aten.minimum.default, aten.rsub.Scalar)  # fmt: skip
def combine(own: Analysis, node: fx.Node) -> Found:
    """Two values, number by number: their channels are joined."""
    rank = len(shape(node))
    pairs = [(a, own.channels(a)) for a in arguments(node) if isinstance(a, fx.Node)]
    places = {rank - len(shape(a)) + c.dim for a, c in pairs if c is not None}
    if len(places) != 1:
        own.pin_inputs(node)
        return None
    dim, followed = places.pop(), [c for _, c in pairs if c is not None]
    count, labels = shape(node)[dim], followed[0].labels
    if any(len(c.labels) != count for c in followed) or any(_reaches(a, c, rank, dim) for a, c in pairs):
        own.pin_inputs(node)
        return None
    for argument, channels in pairs:
        at = dim - rank + len(shape(argument))
        if channels is not None:
            own.labels.join(channels.labels, labels)
        elif is_constant(argument) and at >= 0 and shape(argument)[at] > 1:
            own.tie(argument, at, labels)
    return Channels(dim, labels, _combined(own, node, dim, count))


def _reaches(argument: fx.Node, channels: Channels | None, rank: int, dim: int) -> bool:
    """Return whether a value has channels of its own in a dimension, but they are not followed."""
    at = dim - rank + len(shape(argument))
    return channels is None and not is_constant(argument) and at >= 0 and shape(argument)[at] != 1


def _combined(own: Analysis, node: fx.Node, dim: int, count: int) -> Tensor:
    """Return the values of channels that are combined."""
    rank, values = len(shape(node)), list[Any]()
    for argument in arguments(node):
        channels = own.channels(argument)
        if channels is not None:
            values.append(channels.values)
        elif is_constant(argument):
            values.append(_per_channel(constant(own.graph, argument).detach().cpu(), dim, rank, count))
        else:
            values.append(unknown(count) if isinstance(argument, fx.Node) else argument)
    gate = gate_of(own.graph, node)
    if gate is not None:
        (kept,) = [c.values for a in arguments(node) if (c := own.channels(a)) is not None]
        gates = _per_channel(gate[1].detach().cpu(), dim, rank, count)
        return torch.where((gates == 0) | (kept == 0), 0, kept * gates)
    if node.target == aten.mul.Tensor and all(isinstance(v, Tensor) for v in values):
        return torch.where((values[0] == 0) | (values[1] == 0), 0, values[0] * values[1])
    if node.target in (aten.where.ScalarOther, aten.where.self):
        return unknown(count)
    result: Tensor = operation(node)(*values, **node.kwargs)
    return torch.where(result.isfinite(), result, UNKNOWN)


def _per_channel(tensor: Tensor, dim: int, rank: int, count: int) -> Tensor:
    """Return the value of a constant for each channel; NaN where it is not the same in all places of a channel."""
    tensor = tensor.double().reshape((1,) * (rank - tensor.dim()) + tuple(tensor.shape)).movedim(dim, 0).flatten(1)
    same = (tensor == tensor[:, :1]).all(1)
    return torch.where(same, tensor[:, 0], UNKNOWN).expand(count)


@rule(GETITEM)
def item(own: Analysis, node: fx.Node) -> Found:
    """One of several values."""
    found = own.found.get(arguments(node)[0])
    return found[arguments(node)[1]] if isinstance(found, list) else None
