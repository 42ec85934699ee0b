"""New widths: which layers must grow together, and by how much, so that the shapes of a trunk still fit.

Layers whose results are added, a norm and what it normalises, a convolution in groups and its input, and the layers of one
recurrent or attention module grow in the same proportion. A width stays a multiple of what it is divided into: a group or an
attention head keeps its number of channels, and there are more groups and heads.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple

from torch import nn

from hatrack.methods.growth.attributes import heads_of
from hatrack.methods.growth.mapping import parts_of
from hatrack.options import nearest, shown
from hatrack.tracing.labels import Label, Labels, Set
from hatrack.tracing.units import Units

MOST = 100.0  # the largest share that a layer grows by: a hundred times its width


class Run(NamedTuple):
    """Neighbouring indices of a dimension that belong to the same layers."""

    layers: frozenset[str]
    length: int


def runs(labels: Iterable[Label], layer_of: list[str]) -> Iterator[Run]:
    """Yield the runs of a dimension, in order; indices that belong to no layer form runs without layers."""
    owners = (frozenset(layer_of[u] for part in label if part for u in part) for label in labels)
    for layers, run in groupby(owners):
        yield Run(layers, len(list(run)))


def grown_size(labels: Iterable[Label], layer_of: list[str], old: Mapping[str, int], new: Mapping[str, int]) -> int:
    """Return the size of a dimension after growth; raise a ValueError if it is not clear.

    Args:
        labels: the label of every index.
        layer_of: the layer of every unit.
        old: the widths of the layers.
        new: the widths after growth.
    """
    total = 0
    for layers, length in runs(labels, layer_of):
        lengths = {length * new[layer] / old[layer] for layer in layers} or {float(length)}
        if len(lengths) > 1 or not min(lengths).is_integer():
            raise ValueError(f"{length} channels belong to layers that can't grow together: {', '.join(sorted(layers))}")
        total += int(min(lengths))
    return total


def wished_widths(by: Any, units: Units) -> dict[str, int]:
    """Return the least new width of the layers that are to grow.

    Args:
        by: a share, by which every layer grows; or a mapping of layers to numbers of units (int) or shares (float).
        units: the units of the trunk; a layer may also be named by a parameter that writes its units.
    """
    old = {name: units.stop - units.start for name, units in units.layers.items()}
    if not isinstance(by, Mapping):
        return {name: _wished(name, width, by, share=True) for name, width in old.items()}
    found: dict[str, int] = {}
    for name, value in by.items():
        own = layers_of(units, name)
        if not own:
            raise ValueError(f"no layer {shown(name)} has units that could grow; {nearest(name, old)}")
        found |= {layer: _wished(str(name), old[layer], value, share=not _is_int(value)) for layer in own}
    return found


def layers_of(units: Units, name: str) -> list[str]:
    """Return the layers that a name of `usage` stands for: all calls of a layer, or those that a parameter writes."""
    named = [layer for layer in units.layers if layer == name or layer.partition(" (call ")[0] == name]
    return named or [layer for layer in units.layers if name in units.weights_of(layer)]


def width_of(units: Units, name: str) -> int:
    """Return the number of units of the widest layer that a name of `usage` stands for; 1 if there is none."""
    found = [units.layers[layer] for layer in layers_of(units, name)]
    return max((own.stop - own.start for own in found), default=1)


def size_of(units: Units, name: str) -> int:
    """Return how many weights a name of `usage` has, if it is that of a parameter, and how many units otherwise."""
    if name not in units.layers and (parameter := dict(units.trunk.named_parameters()).get(name)) is not None:
        return parameter.numel()
    return width_of(units, name)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _wished(name: str, width: int, value: Any, *, share: bool) -> int:
    """Return the least new width of a layer."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= (MOST if share else MOST * width):
        kind = f"a share above 0 and up to {MOST:g}" if share else f"from 1 to {MOST * width:g} units"
        raise ValueError(f"growth of {name} must be {kind}, not {shown(value)}")
    return math.ceil(width * (1 + value) - 1e-9) if share else width + int(value)


class Ties:
    """Layers in classes, of which each grows as a whole.

    Args:
        trunk: the trunk.
        units: its units.
        labels: its labels.
    """

    def __init__(self, trunk: nn.Module, units: Units, labels: Labels) -> None:
        self.old = {name: own.stop - own.start for name, own in labels.layers.items()}
        self.layer_of, self.root = labels.layer_of(), {name: name for name in self.old}
        self.grain = dict.fromkeys(self.old, 1)  # a width is a multiple of it
        self.parts = parts_of(labels)
        stopped = units.frozen().tolist()
        self.fixed = {name for name, own in labels.layers.items() if stopped[own.start] or self.old[name] == 1}
        for label in [*(s for row in labels.all() for s in row), *((s,) for s in labels.sources.values())]:
            self._tie(*label)
        for unit, source in labels.sources.items():
            self._tie(frozenset([unit]), source)
        for group in labels.grouped:
            self._tie(frozenset(group.outputs), *group.inputs)
            self._divide(frozenset(group.outputs), len(group.outputs) // group.groups)
            for part in group.inputs:
                self._divide(part, max(1, len(group.inputs) // group.groups))
            if not all(group.inputs):  # it reads pixels, whose number stays
                self.fixed.add(self.layer_of[group.outputs[0]])
        for row in labels.all():
            for run in runs(row, self.layer_of):
                for layer in run.layers:
                    self._multiple(layer, self.old[layer] // math.gcd(self.old[layer], run.length))
        self._modules(trunk, units, labels)
        alone = [layers[0] for layers in self.classes() if len(layers) == 1]
        self.fixed.update(layer for layer in alone if layer in units.gated)  # a parameter of places, not of channels

    def _find(self, layer: str) -> str:
        while self.root[layer] != layer:
            layer = self.root[layer]
        return layer

    def tie(self, layers: Iterable[str]) -> None:
        """Let some layers grow in the same proportion."""
        first, *others = [self._find(layer) for layer in layers] or [""]
        for other in others:
            self.root[self._find(other)] = self._find(first)

    def _tie(self, *parts: Set) -> None:
        self.tie({self.layer_of[u] for part in parts if part for u in part})

    def _multiple(self, layer: str, grain: int) -> None:
        if self.old[layer] % grain == 0:
            self.grain[layer] = math.lcm(self.grain[layer], grain)

    def _divide(self, part: Set, grain: int) -> None:
        for layer in {self.layer_of[u] for u in part or ()}:
            self._multiple(layer, grain)

    def _modules(self, trunk: nn.Module, units: Units, labels: Labels) -> None:
        """Tie the layers of one module, and keep the sizes of groups and heads."""
        for path, module in trunk.named_modules():
            prefix = f"{path}." if path else ""
            own = [layer for layer in self.old if units.weights_of(layer)[0].startswith(prefix)]
            if isinstance(module, nn.RNNBase):
                self.tie(layer for layer in own if not layer.endswith("(projection)"))
                self.tie(layer for layer in own if layer.endswith("(projection)"))
            if isinstance(module, nn.MultiheadAttention):
                read = {self.layer_of[u] for (name, d), row in labels.dims.items() if name.startswith(prefix) and d == 1
                        for label in row for part in label if part for u in part}  # fmt: skip
                self.tie(layer for layer in {*own, *read} if self.old[layer] == module.embed_dim)
            pixels = isinstance(module, nn.modules.conv._ConvNd) and module.groups > 1  # unless they are channels of a layer
            if pixels and f"{prefix}weight" not in [group.weight for group in labels.grouped]:
                self.fixed.update(own)
            if isinstance(module, nn.GroupNorm) and (f"{prefix}weight", 0) in labels.dims:
                for label in labels.dims[f"{prefix}weight", 0]:
                    self._divide(label[0], module.num_channels // module.num_groups)
            for heads in heads_of(module).values():
                for layer in own:
                    if self.old[layer] % heads == 0:
                        self._multiple(layer, self.old[layer] // heads)

    def classes(self) -> list[list[str]]:
        """Return the layers that grow together."""
        found: dict[str, list[str]] = {}
        for layer in self.old:
            found.setdefault(self._find(layer), []).append(layer)
        return list(found.values())

    def tie_equal(self) -> None:
        """Let layers of one width, or with parts of one width, grow together: what is multiplied must fit, too."""
        alike: dict[int, list[str]] = {}
        for layer, width in self.old.items():
            if not any(other in self.fixed for other in self.old if self._find(other) == self._find(layer)):
                alike.setdefault(width // self.parts.get(layer, 1), []).append(layer)
        for layers in alike.values():
            self.tie(layers)


def new_widths(ties: Ties, wished: Mapping[str, int]) -> dict[str, int]:
    """Return the new width of every layer, given the least width of those that are to grow.

    Layers that share their width with one that can't grow stay as they are, unless all wishes are such: then this raises.
    """
    new, stuck = dict(ties.old), list[str]()
    for layers in ties.classes():
        asked = [layer for layer in layers if wished.get(layer, 0) > ties.old[layer]]
        if not asked:
            continue
        if not ties.fixed.isdisjoint(layers):
            stuck += asked
            continue
        base = math.gcd(*(ties.old[layer] for layer in layers))
        least = max(math.ceil(base * wished[layer] / ties.old[layer]) for layer in asked)
        grain = math.lcm(*(ties.grain[layer] for layer in layers))
        sizes = range(max(least, base + 1), max(least, base + 1) + grain)  # among so many is a multiple of it
        size = next(s for s in sizes if all(ties.old[layer] // base * s % ties.grain[layer] == 0 for layer in layers))
        new |= {layer: ties.old[layer] // base * size for layer in layers}
    if new == ties.old:
        why = "it is frozen, has a single unit, or must fit the pixels of an image"
        raise ValueError(f"no layer can grow: {', '.join(sorted(stuck)[:3])}: {why}")
    return new
