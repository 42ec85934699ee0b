"""The numbers of the units of a trunk: a layer that is called again has the same units at every call."""

from collections.abc import Hashable, Iterable, Sequence


class UnitTable:
    """Units 0, 1, 2, ..., and which layer has which of them.

    Attributes:
        count: the number of units.
        layers: the units of every layer, by name.
        weights: of layers with several weights, such as recurrent ones, the names of the weights that write the units.
    """

    def __init__(self) -> None:
        self.count = 0
        self.layers: dict[str, slice] = {}
        self.weights: dict[str, tuple[str, ...]] = {}
        self._first: dict[Hashable, int] = {}  # the first unit of a layer
        self._of_channel: dict[tuple[str, int], int] = {}  # the unit of a channel of a norm

    def of_layer(self, layer: Hashable, name: str, count: int, weights: Iterable[str] = ()) -> int:
        """Return the first unit of a layer, which gets new units if it was not called before.

        Args:
            layer: what identifies the layer.
            name: its name for people.
            count: how many units it has.
            weights: the names of its weights, if their names are not that of the layer and ".weight".
        """
        if layer not in self._first:
            self._first[layer] = self._add(name, count)
            self.weights |= {name: found} if (found := tuple(weights)) else {}
        return self._first[layer]

    def of_channels(self, norm: str, name: str, channels: Sequence[int]) -> list[int]:
        """Return a unit for each of some channels of a norm; channels that had none before get new units."""
        new = [c for c in channels if (norm, c) not in self._of_channel]
        if new:
            first = self._add(name, len(new))
            self._of_channel |= {(norm, c): first + k for k, c in enumerate(new)}
        return [self._of_channel[norm, c] for c in channels]

    def _add(self, name: str, count: int) -> int:
        """Add units and return the number of the first one."""
        self.layers[name] = slice(self.count, self.count + count)
        self.count += count
        return self.count - count
