"""The rules of operations that move, split and join channels, and of attention. See `analysis.py`."""

from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, fx

from hatrack.methods.extraction.analysis import Analysis, Found, Rules, arguments, only_zeros, operation, rules_in, unknown
from hatrack.methods.extraction.capture import aten, constant, is_constant, shape
from hatrack.methods.extraction.labels import UNKNOWN, Channels

VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
PIECES = (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.split.sizes)

RULES: Rules = {}
rule = rules_in(RULES)


@rule(*VIEWS, aten.flatten.using_ints, aten.unflatten.int)
def view(own: Analysis, node: fx.Node) -> Found:
    """The same numbers in another shape: channels may be joined with dimensions beside them, or split into several."""
    channels = own.channels(arguments(node)[0])
    if channels is None:
        return None
    before, after = shape(arguments(node)[0]), shape(node)
    for old, new in matched(before, after):
        if old.start <= channels.dim < old.stop:
            return _reshaped(own, channels, before, after, old, new)
    own.pin(channels)
    return None


def matched(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[range, range]]:
    """Return which dimensions of a shape become which of another: the smallest runs with equal products.

    The number of images, written as -1, is a run by itself; where it is not, nothing is returned.
    """
    runs, i, j = list[tuple[range, range]](), 0, 0
    while i < len(before) and j < len(after):
        start, end, one, two = i, j, before[i], after[j]
        if (one == -1) != (two == -1):
            return []
        i, j = i + 1, j + 1
        while one != two:
            if one < two and i < len(before) and before[i] != -1:
                one, i = one * before[i], i + 1
            elif two < one and j < len(after) and after[j] != -1:
                two, j = two * after[j], j + 1
            else:
                return []
        while i < len(before) and before[i] == 1 and (j >= len(after) or after[j] != 1):
            i += 1
        while j < len(after) and after[j] == 1 and (i >= len(before) or before[i] != 1):
            j += 1
        runs.append((range(start, i), range(end, j)))
    return runs


def _reshaped(
    own: Analysis, channels: Channels, before: tuple[int, ...], after: tuple[int, ...], old: range, new: range
) -> Channels:
    """Return channels after the dimensions `old` have become the dimensions `new`."""
    place = [-1 if d == channels.dim else 1 for d in old]
    sizes = [before[d] for d in old]
    labels, values = (t.view(place).expand(sizes).reshape([after[d] for d in new]) for t in channels[1:])
    dims = [d for d in range(len(new)) if labels.shape[d] > 1] or [0]
    # A label that is the same along all other dimensions: the split undoes a join. Otherwise heads are kept or cut whole; of
    # packed queries, keys and values (3, heads, width), heads are the second dimension.
    fitting = [d for d in dims if _same_elsewhere(labels, d)]
    chosen = fitting[0] if fitting else dims[1] if len(dims) > 2 and labels.shape[dims[0]] == 3 else dims[0]
    labels, values = (t.movedim(chosen, 0).reshape(t.shape[chosen], -1) for t in (labels, values))
    for column in labels.T[1:]:
        own.labels.join(column, labels[:, 0])
    alike = (values == values[:, :1]).all(1)
    return Channels(new.start + chosen, labels[:, 0].clone(), torch.where(alike, values[:, 0], UNKNOWN))


def _same_elsewhere(labels: Tensor, dim: int) -> bool:
    rows = labels.movedim(dim, 0).reshape(labels.shape[dim], -1)
    return bool((rows == rows[:, :1]).all())


@rule(aten.transpose.int, aten.permute.default, aten.movedim.int, aten.t.default, aten.swapaxes.default, aten.mT.default)
def permute(own: Analysis, node: fx.Node) -> Found:
    """Dimensions in another order."""
    channels = own.channels(arguments(node)[0])
    if channels is None:
        return None
    numbers = torch.empty([d + 1 for d in range(len(shape(arguments(node)[0])))])  # sizes that tell dimensions apart
    moved = list(operation(node)(numbers, *arguments(node)[1:]).shape)
    return channels._replace(dim=moved.index(channels.dim + 1))


@rule(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeeze(own: Analysis, node: fx.Node) -> Found:
    """A dimension of size 1 more or less."""
    channels = own.channels(arguments(node)[0])
    if channels is None:
        return None
    rank = len(shape(arguments(node)[0]))
    dims = [arguments(node)[1]] if isinstance(arguments(node)[1], int) else list(arguments(node)[1])
    if node.target == aten.unsqueeze.default:
        return channels._replace(dim=channels.dim + (dims[0] % (rank + 1) <= channels.dim))
    removed = [d % rank for d in dims if shape(arguments(node)[0])[d] == 1]
    if channels.dim in removed:
        own.pin(channels)
        return None
    return channels._replace(dim=channels.dim - sum(d < channels.dim for d in removed))


@rule(aten.expand.default)
def expand(own: Analysis, node: fx.Node) -> Found:
    """The same numbers for every image, such as a class token (1, 1, channels) of the module."""
    source, rank = arguments(node)[0], len(shape(node))
    channels = own.channels(source)
    if channels is None and is_constant(source):
        dim = len(shape(source)) - 1 if rank == 3 else len(shape(source)) - rank + 1
        if dim >= 0 and shape(source)[dim] > 1:
            labels = own.parameter(source, dim)
            rows = constant(own.graph, source).detach().double().cpu().movedim(dim, 0).flatten(1)
            values = torch.where((rows == rows[:, :1]).all(1), rows[:, 0], UNKNOWN)
            return Channels(dim + rank - len(shape(source)), labels, values)
    if channels is None:
        return None
    if len(channels.labels) == 1:  # may become several
        own.pin(channels)
        return None
    return channels._replace(dim=channels.dim + rank - len(shape(source)))


@rule(aten.cat.default, aten.concat.default)
def cat(own: Analysis, node: fx.Node) -> Found:
    """Values one after the other, along the channels or beside them."""
    parts: Any = arguments(node)[0]
    dim = (arguments(node)[1] if len(node.args) > 1 else 0) % len(shape(node))
    found = [own.channels(part) for part in parts]
    places = {c.dim for c in found if c is not None}
    if places == {dim}:
        whole = [c or _pinned(own, shape(part)[dim], dim) for c, part in zip(found, parts, strict=True)]
        return Channels(dim, torch.cat([c.labels for c in whole]), torch.cat([c.values for c in whole]))
    followed = [c for c in found if c is not None]
    if len(places) != 1 or any(c is None and not is_constant(p) for c, p in zip(found, parts, strict=True)):
        own.pin_inputs(node)
        return None
    at, labels = places.pop(), followed[0].labels
    values = followed[0].values
    for part, channels in zip(parts, found, strict=True):
        if channels is None:
            own.tie(part, at, labels)
            values = unknown(len(labels))
        else:
            own.labels.join(channels.labels, labels)
            values = torch.where(values == channels.values, values, UNKNOWN)
    return Channels(at, labels, values)


def _pinned(own: Analysis, count: int, dim: int) -> Channels:
    """Return channels that are not to be cut."""
    labels = own.labels.new(count)
    own.labels.pin(labels)
    return Channels(dim, labels, unknown(count))


@rule(*PIECES, aten.unbind.int)
def pieces(own: Analysis, node: fx.Node) -> Found:
    """A value in pieces, along the channels or beside them."""
    channels = own.channels(arguments(node)[0])
    if channels is None:
        return None
    place = 1 if node.target == aten.unbind.int else 2
    rank = len(shape(arguments(node)[0]))
    dim = (arguments(node)[place] if len(node.args) > place else 0) % rank
    parts = node.meta["val"]
    if node.target == aten.unbind.int:
        if dim == channels.dim:
            own.pin(channels)
            return None
        return [channels._replace(dim=channels.dim - (dim < channels.dim))] * len(parts)
    if dim != channels.dim:
        return [channels] * len(parts)
    sizes = [part.shape[dim] for part in parts]
    starts = [0, *accumulate(sizes)]
    return [Channels(dim, channels.labels[a:b], channels.values[a:b]) for a, b in pairwise(starts)]


@rule(aten.select.int, aten.slice.Tensor)
def select(own: Analysis, node: fx.Node) -> Found:
    """A part of a value, in another dimension than that of the channels or a run of the channels."""
    channels = own.channels(arguments(node)[0])
    if channels is None:
        return None
    dim = (arguments(node)[1] if len(node.args) > 1 else 0) % len(shape(arguments(node)[0]))
    if node.target == aten.slice.Tensor and dim != channels.dim:
        return channels
    if node.target == aten.select.int and dim != channels.dim:
        return channels._replace(dim=channels.dim - (dim < channels.dim))
    if node.target == aten.slice.Tensor and len(node.args) < 5:
        start, stop, _ = slice(*arguments(node)[2:4]).indices(len(channels.labels))
        return Channels(dim, channels.labels[start:stop], channels.values[start:stop])
    own.pin(channels)
    return None


@rule(aten.scaled_dot_product_attention.default)
def attention(own: Analysis, node: fx.Node) -> Found:
    """Attention (images, heads, tokens, width): heads are kept or cut whole."""
    found = [own.channels(part) for part in arguments(node)[:3]]
    mask = arguments(node)[3] if len(node.args) > 3 else None
    wide = isinstance(mask, fx.Node) and len(shape(mask)) > 2 and shape(mask)[-3] != 1
    query, key, value = found
    same = all(c is not None and c.dim == 1 and len(c.labels) == shape(node)[1] for c in found)
    if len(shape(node)) != 4 or wide or not same or query is None or key is None or value is None:
        own.pin_inputs(node)
        return None
    own.labels.join(query.labels, value.labels)
    own.labels.join(key.labels, value.labels)
    return Channels(1, value.labels, only_zeros(value.values))
