"""Where every index of a tensor lies after the trunk has grown, by the labels of both traces."""

from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from hatrack.tracing.labels import Label, Labels, Set

MANY = 64  # units of a sum; more of them are those of a mean over channels


class Places(NamedTuple):
    """The places of a narrow trunk's units and tensors in a wider one.

    Attributes:
        units: (units,), the unit of the wider trunk for every unit.
        dims: for every dimension that has grown, (size,): the index in the wider tensor for every index; by the name of
            the tensor and the number of the dimension.
    """

    units: Tensor
    dims: dict[tuple[str, int], Tensor]

    def of(self, name: str) -> list[tuple[int, Tensor]]:
        """Return the dimensions of a tensor that have grown, with their places."""
        return [(dim, places) for (known, dim), places in self.dims.items() if known == name]

    def then(self, later: "Places") -> "Places":
        """Return the places after the wider trunk has grown as well."""
        dims = {key: later.dims[key][places] if key in later.dims else places for key, places in self.dims.items()}
        return Places(later.units[self.units], {**later.dims, **dims})

    def to(self, device: torch.device) -> "Places":
        """Return the places on a device."""
        return Places(self.units.to(device), {key: places.to(device) for key, places in self.dims.items()})

    def narrow(self, name: str, wide: Tensor) -> Tensor:
        """Return the part of a wide tensor that the narrow trunk has: the tensor itself if it has not grown."""
        for dim, places in self.of(name):
            wide = wide.index_select(dim, places)
        return wide

    def put(self, name: str, wide: Tensor, narrow: Tensor) -> None:
        """Write the values of a narrow tensor into their places in a wide one."""
        index: list[Tensor] = []
        grown = dict(self.of(name))
        for dim, size in enumerate(narrow.shape):
            places = grown.get(dim, torch.arange(size, device=wide.device))
            index.append(places.view([-1 if d == dim else 1 for d in range(narrow.dim())]))
        wide[tuple(index) if index else ...] = narrow.to(wide)


def match(narrow: Labels, wide: Labels, *, parts: bool, groups: bool) -> Places:
    """Return the places of a narrow trunk in a wide one; raise a ValueError if the traces don't correspond.

    Args:
        narrow: the labels of the narrow trunk.
        wide: those of the wide one.
        parts: layers that are split into equal parts, as one of queries, keys and values, have grown within every part;
            otherwise all their new units are behind the old ones.
        groups: the units of convolutions in groups follow the channels that they read.
    """
    if len(narrow.layers) != len(wide.layers) or narrow.dims.keys() != wide.dims.keys():
        raise ValueError("the wider trunk calls other layers than before")
    units = _units(narrow, wide, parts, groups)
    back = {new: old for old, new in units.items()}
    dims = {}
    for key, labels in narrow.dims.items():
        places = _match(labels, wide.dims[key], back, " ".join(map(str, key)))
        if len(labels) != len(wide.dims[key]):
            dims[key] = torch.tensor(places)
        elif places != list(range(len(places))):
            raise ValueError(f"the channels of {key[0]} are in another order than before")
    _match(narrow.features, wide.features, back, "the features")
    return Places(torch.tensor([units[u] for u in range(len(units))]), dims)


def _units(narrow: Labels, wide: Labels, parts: bool, groups: bool) -> dict[int, int]:
    """Return the wide unit of every narrow one.

    Old units come first in their layer, or in their part of it. But those of a norm, or of a convolution in groups, follow
    what they read, and those of a layer that is added to such a one follow it.
    """
    split, rows = parts_of(narrow) if parts else {}, dict[str, list[int]]()  # the index within the layer
    own, other = (labels.sources if groups else labels.norm_units for labels in (narrow, wide))
    ends = {
        name: (old, new) for name, old, new in zip(narrow.layers, narrow.layers.values(), wide.layers.values(), strict=True)
    }
    for name, (old, new) in ends.items():
        count, grown, number = old.stop - old.start, new.stop - new.start, split.get(name, 1)
        each, wider = (count // number, grown // number) if grown % number == 0 else (count, grown)
        rows[name] = [k // each * wider + k % each for k in range(count)]
    added = _added(narrow)
    for _ in range(len(rows)):  # until nothing changes: a layer may follow one that is called later
        before = dict(rows)
        units = {old.start + k: new.start + row for name, (old, new) in ends.items() for k, row in enumerate(rows[name])}
        back = {new: old for old, new in units.items()}
        for name, (old, new) in ends.items():
            if any(own.get(u) for u in range(old.start, old.stop)):
                reads = [_label(own.get(u)) for u in range(old.start, old.stop)]
                found = [_label(other.get(u)) for u in range(new.start, new.stop)]
                with suppress(ValueError):  # of a norm in a loop, which reads its own units, or other groups
                    rows[name] = _match(reads, found, back, name)
            elif groups and (first := next((n for n in added.get(name, ()) if own.get(ends[n][0].start)), None)):
                rows[name] = rows[first]
        if rows == before:
            break
    return {old.start + k: new.start + row for name, (old, new) in ends.items() for k, row in enumerate(rows[name])}


def _added(labels: Labels) -> dict[str, list[str]]:
    """Return for every layer those of the same width whose units are added to its units, each to that of the same number."""
    layer_of, found, wrong = labels.layer_of(), dict[str, list[str]](), set[tuple[str, str]]()
    for part in {part for row in labels.all() for label in row for part in label if part and 1 < len(part) <= MANY}:
        places = [(layer_of[u], u - labels.layers[layer_of[u]].start) for u in sorted(part)]
        for one, at in places:
            for two, there in places:
                if one != two and at == there and two not in found.setdefault(one, []):
                    found[one].append(two)
                wrong |= {(one, two)} if at != there else set()
    return {one: [two for two in others if (one, two) not in wrong] for one, others in found.items()}


def parts_of(labels: Labels) -> dict[str, int]:
    """Return into how many equal parts layers are split, where others read only some of the parts."""
    found: dict[str, int] = {}
    firsts = {name: own.start for name, own in labels.layers.items()}
    layer_of = labels.layer_of()
    for row in labels.all():
        read: dict[str, set[int]] = {}
        for label in row:
            for part in label:
                for unit in part or ():
                    read.setdefault(layer_of[unit], set()).add(unit - firsts[layer_of[unit]])
        for layer, own in read.items():
            count = labels.layers[layer].stop - firsts[layer]
            if len(own) < count and count % len(own) == 0 and max(own) - min(own) == len(own) - 1:
                found[layer] = max(found.get(layer, 1), count // len(own))
    return found


def _match(narrow: list[Label], wide: list[Label], back: Mapping[int, int], what: str) -> list[int]:
    """Return the wide index of every narrow one: that with the same label or, of several such, the one in the same order."""
    places: dict[Label, list[int]] = {}
    for index, label in enumerate(wide):
        if not any(part and not back.keys() & part for part in label):  # not one of new units alone
            places.setdefault(tuple(_old(part, back) for part in label), []).append(index)
    taken: dict[Label, int] = {}
    result = []
    for label in narrow:
        found, at = places.get(label, []), taken.get(label, 0)
        if at >= len(found):
            raise ValueError(f"the channels of {what} can't be found again in the wider trunk")
        result.append(found[at])
        taken[label] = at + 1
    if sum(map(len, places.values())) != len(narrow):
        raise ValueError(f"the channels of {what} can't be told from new ones in the wider trunk")
    return result


def _label(part: Set) -> Label:
    return (part,)


def _old(part: Set, back: Mapping[int, int]) -> Set:
    return None if part is None else frozenset(back[u] for u in part if u in back)
