"""Where every index of a tensor lies after the trunk has grown, by the labels of both traces."""

from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from hatrack.tracing.labels import Label, Labels, Set

NEW = -1


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


def match(narrow: Labels, wide: Labels, *, parts: bool) -> Places:
    """Return the places of a narrow trunk in a wide one; raise a ValueError if the traces don't correspond.

    Args:
        narrow: the labels of the narrow trunk.
        wide: those of the wide one.
        parts: layers that are split into equal parts, as one of queries, keys and values, have grown within every part;
            otherwise all their new units are behind the old ones.
    """
    if len(narrow.layers) != len(wide.layers) or narrow.dims.keys() != wide.dims.keys():
        raise ValueError("the wider trunk calls other layers than before")
    units = _units(narrow, wide, parts)
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


def _units(narrow: Labels, wide: Labels, parts: bool) -> dict[int, int]:
    """Return the wide unit of every narrow one, layer by layer; those of a norm by what the norm is applied to."""
    units: dict[int, int] = {}
    split = parts_of(narrow)
    for name, old, new in zip(narrow.layers, narrow.layers.values(), wide.layers.values(), strict=True):
        count, grown = old.stop - old.start, new.stop - new.start
        if any(narrow.norm_units.get(u) for u in range(old.start, old.stop)):
            back = {b: a for a, b in units.items()}
            own, others = ([_label(table.get(u)) for u in range(s.start, s.stop)] for table, s in
                           ((narrow.norm_units, old), (wide.norm_units, new)))  # fmt: skip
            with suppress(ValueError):  # of a norm in a loop, which reads its own units: as any other layer, see below
                units |= {old.start + k: new.start + place for k, place in enumerate(_match(own, others, back, name))}
                continue
        number = split.get(name, 1) if parts and grown % split.get(name, 1) == 0 else 1
        each, wider = count // number, grown // number
        units |= {old.start + k: new.start + k // each * wider + k % each for k in range(count)}
    return units


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
