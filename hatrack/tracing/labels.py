"""Labels: which units every index along every dimension of a trunk's tensors belongs to, read off its trace.

The label of an index says which unit its weights write or, along a dimension of inputs, which dependency set they read; a
parameter that is used in several ways has a part per use. A dimension whose indices all have one label, such as that of a
kernel or of the pixels of an image, has no labels: it does not depend on the width of a layer.

Example: the weight (3, 8) of a linear layer behind a convolution of 2 filters, whose images of 2x2 pixels were flattened,
has the labels {2}, {3}, {4} along its first dimension, and {0}, {0}, {0}, {0}, {1}, {1}, {1}, {1} along its second.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hatrack.tracing.dependencies import ALWAYS_ACTIVE
from hatrack.tracing.trace import Use
from hatrack.tracing.units import Units

Set = frozenset[int] | None  # a dependency set; None: not of any unit, or always active
Label = tuple[Set, ...]
NOTHING = -1  # no use of an element is known


class Grouped(NamedTuple):
    """A convolution in groups.

    Attributes:
        weight: the name of its weights.
        groups: how many groups there are.
        outputs: the unit of every output channel.
        inputs: the dependency set of every input channel that a weight reads, in any order.
    """

    weight: str
    groups: int
    outputs: list[int]
    inputs: list[Set]


class Labels(NamedTuple):
    """The labels of a trunk.

    Attributes:
        layers: the units of every layer, by its name.
        dims: the labels of every dimension that has some, by the name of the tensor and the number of the dimension.
        grouped: the convolutions in groups.
        norm_units: of every unit of a norm the dependency set of its input.
        sources: the same, and of every unit of a convolution in groups the dependency set of what its group reads.
        features: the label of every feature.
    """

    layers: dict[str, slice]
    dims: dict[tuple[str, int], list[Label]]
    grouped: list[Grouped]
    norm_units: dict[int, Set]
    sources: dict[int, Set]
    features: list[Label]

    def layer_of(self) -> list[str]:
        """Return the layer of every unit."""
        return [name for name, units in self.layers.items() for _ in range(units.start, units.stop)]

    def all(self) -> Iterator[list[Label]]:
        """Yield the labels of every dimension, and those of the features."""
        yield from self.dims.values()
        yield self.features


def labels_of(units: Units) -> Labels:
    """Return the labels of the trunk whose units these are."""
    sets: list[Set] = [None if k == ALWAYS_ACTIVE else frozenset(units.members(k) or ()) for k in range(units.sets)]
    arrays, dims = _arrays(units), dict[tuple[str, int], list[Label]]()
    for name, (start, shape, stride, offset) in units.layout.items():
        for dim in range(len(shape)) if shape.numel() else ():
            parts: list[list[Set]] = []
            for writes, reads in arrays:
                along = [_along(a.as_strided(shape, stride, start + offset), dim) for a in (writes, reads)]
                if _varies(along[0]):
                    parts.append([None if u == NOTHING else frozenset([u]) for u in along[0].tolist()])
                elif _varies(along[1]):
                    parts.append([None if k == NOTHING else sets[k] for k in along[1].tolist()])
            if parts:
                dims[name, dim] = list(zip(*parts, strict=True))
    for name, (dim, found) in [*units.norm_inputs.items(), *units.beside.items()]:
        if len(set(found)) > 1 and not any(known == name for known, _ in dims):
            dims[name, dim] = [(s,) for s in found]
    features: list[Label] = [(sets[k],) for k in units.features.flatten().tolist()]
    sources = {**units.norm_units, **_sources(units, sets)}
    return Labels(units.layers, dims, [*_grouped(units, sets)], units.norm_units, sources, features)


def _arrays(units: Units) -> list[tuple[Tensor, Tensor]]:
    """Return for every element of the parameters the unit that it writes and the set that it reads; once more for those
    that are used in a second way, and so on."""
    total, arrays = units.positions, list[tuple[Tensor, Tensor]]()
    for use in units.uses:
        places = slice(use.start, use.start + use.shape.numel()) if use.positions is None else use.positions.reshape(-1)
        kind = _kind(use)
        for writes, reads in arrays:
            if bool((writes[places] == NOTHING).all() and (reads[places] == NOTHING).all()):
                break
        else:
            writes, reads = (torch.full((total,), NOTHING) for _ in range(2))
            arrays.append((writes, reads))
        if kind != "transposed":  # whose second dimension counts the channels within a group
            writes[places] = use.writes.expand(use.shape).reshape(-1)
        if kind != "grouped":
            reads[places] = use.reads.expand(use.shape).reshape(-1)
    return arrays


def _kind(use: Use) -> str:
    """Return whether a use is that of a convolution in groups, in which both ends depend on one dimension."""
    both = [d for d in range(min(use.writes.dim(), 1)) if use.writes.shape[d] > 1 and use.reads.shape[d] > 1]
    if not both or not _varies(use.reads.reshape(-1)) or not _varies(use.writes.flatten(1)[:, 0]):
        return ""
    return "transposed" if use.writes.dim() > 1 and use.writes.shape[1] > 1 else "grouped"


def _along(values: Tensor, dim: int) -> Tensor:
    """Return the largest value at every index of a dimension."""
    return values.movedim(dim, 0).reshape(values.shape[dim], -1).amax(1)


def _varies(values: Tensor) -> bool:
    return len(values) > 1 and bool((values != values[0]).any())


def _grouped(units: Units, sets: list[Set]) -> Iterator[Grouped]:
    """Yield the convolutions in groups."""
    for use in units.uses:
        kind = _kind(use)
        if kind:
            owner = [n for n, (start, shape, _, offset) in units.layout.items() if start + offset == use.start]
            side = use.reads.flatten(1)[:, 0] if kind == "grouped" else use.writes.flatten(1)[:, 0]
            groups = 1 + int((side[1:] != side[:-1]).sum())
            outputs, inputs = use.writes.unique().tolist(), use.reads.unique().tolist()  # type: ignore[no-untyped-call]
            yield Grouped(owner[0] if owner else "", groups, outputs, [sets[k] for k in inputs])


def _sources(units: Units, sets: list[Set]) -> dict[int, Set]:
    """Return for every unit of a convolution in groups what its group reads."""
    found: dict[int, Set] = {}
    for use in filter(_kind, units.uses):
        ends = (end.flatten(2)[:, :, 0] if end.dim() > 2 else end for end in (use.writes, use.reads))
        writes, reads = torch.broadcast_tensors(*ends)  # type: ignore[no-untyped-call]
        for unit, k in zip(writes.flatten().tolist(), reads.flatten().tolist(), strict=True):
            one, two = found.get(unit, frozenset()), sets[k]
            found[unit] = None if one is None or two is None else one | two
    return found
