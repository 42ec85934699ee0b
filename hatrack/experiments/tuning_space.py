"""Search spaces: the ranges and the choices of options among which `hatrack tune` searches."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

DIGITS = 4  # significant digits of a value that is tried


@dataclass(frozen=True)
class Range:
    """All numbers from `low` to `high`.

    Attributes:
        low: the smallest value.
        high: the largest value.
        log: search on a logarithmic scale.
        whole: whole numbers only.
    """

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def __str__(self) -> str:
        return f"{_text(self.low)}:{_text(self.high)}{':log' if self.log else ''}"

    def contains(self, value: Any) -> bool:
        """Return whether a value lies in the range."""
        return isinstance(value, int | float) and self.low <= value <= self.high

    def rounded(self, value: float) -> float:
        """Return a value with few digits that lies in the range."""
        return round(value) if self.whole else min(self.high, max(self.low, float(f"{value:.{DIGITS}g}")))

    def points(self, count: int) -> list[float]:
        """Return `count` values for a grid, evenly spaced from the lowest to the highest; fewer if they would be equal."""
        ends = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        values = np.linspace(*ends, count).tolist()
        return list(dict.fromkeys(self.rounded(math.exp(value) if self.log else value) for value in values))


@dataclass(frozen=True)
class Choices:
    """A few values of any type."""

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return "|".join(map(_text, self.values))

    def contains(self, value: Any) -> bool:
        """Return whether a value is one of the choices."""
        return value in self.values

    def points(self, count: int) -> list[str]:
        """Return the texts of all choices, by which a journal names them."""
        return [_text(value) for value in self.values]


Axis = Range | Choices
Space = Mapping[str, Axis]


def grid_size(space: Space, points: int) -> int:
    """Return how many points the grid of a space has, with `points` values per range."""
    return math.prod(len(axis.points(points)) for axis in space.values())


def to_values(space: Space, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of options that the parameters of a journal stand for: of a choice, the journal has its text."""
    found = {}
    for name, axis in space.items():
        value = parameters[name]
        found[name] = next(v for v in axis.values if _text(v) == value) if isinstance(axis, Choices) else value
    return found


def to_parameters(space: Space, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a journal that stand for values of options, with few digits."""
    return {
        name: _text(values[name]) if isinstance(axis, Choices) else axis.rounded(values[name])
        for name, axis in space.items()
    }


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(map(_text, value))
    return f"{value:.10g}" if isinstance(value, float) else str(value)
