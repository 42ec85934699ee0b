"""The rules of layers and norms. See `analysis.py`."""

from typing import Any

import torch
from torch import Tensor, fx

from hatrack.methods.extraction.analysis import Analysis, Found, Rules, arguments, only_zeros, rules_in, unknown, zero_if
from hatrack.methods.extraction.capture import aten, is_constant, shape
from hatrack.methods.extraction.folding import CONVOLUTIONS
from hatrack.methods.extraction.labels import UNKNOWN, Channels, Read

RULES: Rules = {}
rule = rules_in(RULES)


@rule(aten.linear.default)
def linear(own: Analysis, node: fx.Node) -> Found:
    """y = W x + b along the last dimension."""
    x, weight, bias = [*arguments(node), None][:3]
    return _product(own, node, x, weight, bias, 0)


@rule(aten.matmul.default, aten.mm.default)
def matmul(own: Analysis, node: fx.Node) -> Found:
    """A product with a matrix of the module, or of two values with the same channels in a dimension that is not added up."""
    x, y = arguments(node)
    if is_constant(y) and len(shape(y)) == 2:
        return _product(own, node, x, y, None, 1)
    one, two = own.channels(x), own.channels(y)
    rank = len(shape(node))
    if one and two and one.dim == two.dim < rank - 2 and len(shape(x)) == len(shape(y)) == rank:
        own.labels.join(one.labels, two.labels)
        return Channels(one.dim, one.labels, zero_if(one, two))
    own.pin_inputs(node)
    return None


@rule(aten.addmm.default)
def addmm(own: Analysis, node: fx.Node) -> Found:
    """y = b + x W."""
    bias, x, weight = arguments(node)
    if not is_constant(weight) or not is_constant(bias) or len(shape(bias)) != 1 or node.kwargs:
        own.pin_inputs(node)
        return None
    return _product(own, node, x, weight, bias, 1)


def _product(own: Analysis, node: fx.Node, x: Any, weight: Any, bias: Any, rows: int) -> Found:
    """Return the channels of a product along the last dimension, whose matrix has its results in dimension `rows`."""
    channels, matrix, last = own.channels(x), own.value(weight), len(shape(node)) - 1
    if matrix is None or (bias is not None and not is_constant(bias)) or is_constant(x):
        own.pin_inputs(node)
        return None
    if channels is not None and channels.dim != last:
        own.pin(channels)
        channels = None
    labels = own.parameter(weight, rows)
    own.tie(bias, 0, labels)
    if channels is not None:
        own.labels.join(own.parameter(weight, 1 - rows), channels.labels)
    matrix = matrix if rows == 0 else matrix.t()
    values = _add_up(own, node, channels, matrix.abs(), matrix, labels, own.value(bias), foldable=True)
    return Channels(last, labels, values)


def _add_up(
    own: Analysis,
    node: fx.Node,
    channels: Channels | None,
    matrix: Tensor,
    sums: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    *,
    foldable: bool,
) -> Tensor:
    """Note that a layer adds up channels, and return the values of its results."""
    count = matrix.shape[1]
    if channels is None:
        channels = Channels(0, rows.new_zeros(0), unknown(count))
    else:
        own.reads.append(Read(node, channels, matrix, sums, rows, foldable))
    known = channels.known() if foldable else channels.values == 0
    result = sums @ torch.where(known, channels.values, 0) + (0 if bias is None else bias)
    return torch.where(((matrix != 0) & ~known).any(1), UNKNOWN, result)


@rule(*CONVOLUTIONS)
def convolution(own: Analysis, node: fx.Node) -> Found:
    """A convolution with one group, or with one group per channel."""
    defaults = [None, None, None, None, 0, None, 1]  # of input, weight, bias, stride, padding, dilation, groups
    x, weight, bias, _, padding, _, groups = arguments(node) + defaults[len(node.args) :]
    channels, kernel = own.channels(x), own.value(weight)
    if kernel is None or (bias is not None and not is_constant(bias)) or (channels is not None and channels.dim != 1):
        own.pin_inputs(node)
        return None
    labels = own.parameter(weight, 0)
    own.tie(bias, 0, labels)
    padded = padding != "valid" and (isinstance(padding, str) or any([padding] if isinstance(padding, int) else padding))
    matrix, sums = kernel.flatten(2).abs().sum(2), kernel.flatten(2).sum(2)
    if groups == 1:
        if channels is not None:
            own.labels.join(own.parameter(weight, 1), channels.labels)
        return Channels(1, labels, _add_up(own, node, channels, matrix, sums, labels, own.value(bias), foldable=not padded))
    if channels is None or kernel.shape[1] != 1:
        own.pin(channels)
        own.labels.pin(labels)
        return Channels(1, labels, unknown(len(labels)))
    times = len(labels) // groups  # results per channel
    own.labels.join(labels, channels.labels.repeat_interleave(times))
    before, bias = channels.values.repeat_interleave(times), own.value(bias)
    still = only_zeros(before) if padded else before
    still = torch.where(matrix[:, 0] == 0, 0, still * sums[:, 0])
    return Channels(1, labels, still if bias is None else still + bias)


# Norms


@rule(aten.batch_norm.default)
def batch_norm(own: Analysis, node: fx.Node) -> Found:
    """A factor and a shift per channel, in evaluation mode."""
    x, weight, bias, mean, variance, training, _, eps = arguments(node)[:8]
    channels = own.channels(x)
    if channels is None:
        return None
    if training or channels.dim != 1:
        own.pin(channels)
        return None
    for tensor in (weight, bias, mean, variance):
        own.tie(tensor, 0, channels.labels)
    factor, shift, centre, spread = (own.value(t) for t in (weight, bias, mean, variance))
    assert centre is not None
    assert spread is not None
    values = (channels.values - centre) / (spread + eps).sqrt()
    values = torch.where(factor == 0, 0, values * factor) if factor is not None else values
    return channels._replace(values=values if shift is None else values + shift)


@rule(aten.layer_norm.default, aten.rms_norm.default)
def layer_norm(own: Analysis, node: fx.Node) -> Found:
    """A norm over all channels needs them all; those that are read of its result are gathered."""
    x, sizes, weight, bias = [*arguments(node)[:4], None, None][:4]
    own.pin(own.channels(x))
    if len(sizes) != 1:
        return None
    factor, shift = own.value(weight), own.value(bias) if node.target == aten.layer_norm.default else None
    values = unknown(sizes[0])
    if factor is not None:
        values = torch.where(factor == 0, 0 if shift is None else shift, values)
    own.gathered.add(node)
    return Channels(len(shape(node)) - 1, own.labels.new(len(values)), values)


@rule(aten.instance_norm.default)
def instance_norm(own: Analysis, node: fx.Node) -> Found:
    """A norm of each channel by itself."""
    x, weight, bias, mean, variance = arguments(node)[:5]
    channels = own.channels(x)
    if channels is None or channels.dim != 1:
        own.pin(channels)
        return None
    for tensor in (weight, bias, mean, variance):
        own.tie(tensor, 0, channels.labels)
    return channels._replace(values=unknown(len(channels.labels)))


@rule(aten.group_norm.default)
def group_norm(own: Analysis, node: fx.Node) -> Found:
    """A norm over groups of channels needs them all; those that are read of its result are gathered."""
    x, _, weight, bias = [*arguments(node)[:4], None, None][:4]
    own.pin(own.channels(x))
    count, factor, shift = shape(node)[1], own.value(weight), own.value(bias)
    values = unknown(count)
    if factor is not None:
        values = torch.where(factor == 0, 0 if shift is None else shift, values)
    own.gathered.add(node)
    return Channels(1, own.labels.new(count), values)
