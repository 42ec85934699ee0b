"""Capacity and reuse (HAT, section 4.4): the weights that each task uses, those it shares with others, those still free.

A weight counts as used by a task if the mask of the task has it; for HAT, if the task's gates open both units that the
weight connects. HAT's paper freezes more: all weights between units that any tasks use (Eq. 2), its "capacity usage".
Biases and norms are not counted.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from hatrack.text import SCARCE


@dataclass(frozen=True)
class LayerCapacity:
    """The weights of one layer.

    Attributes:
        name: the name of the parameter in the trunk.
        title: a name for people.
        weights: how many there are.
        used: after each task, the share that the tasks so far use.
        own: the share that each task uses.
        shared_by: how many weights are used by 0, 1, 2, ... tasks.
    """

    name: str
    title: str
    weights: int
    used: list[float]
    own: list[float]
    shared_by: list[int]

    @property
    def new(self) -> list[float]:
        """The share that each task was the first to use."""
        return [now - before for now, before in zip(self.used, [0.0, *self.used], strict=False)]

    @property
    def reused(self) -> list[float]:
        """The share that each task uses and an earlier one had used."""
        return [own - new for own, new in zip(self.own, self.new, strict=True)]


@dataclass(frozen=True)
class Capacity:
    """What the finished tasks use of a network, in the order in which they were learned.

    Args:
        tasks: the names of the tasks.
        layers: the same for every layer; see `LayerCapacity`.
        used: after each task, the share of all weights that the tasks so far use.
        own: the share of all weights that each task uses.
        reuse: entry [i][j] is the share of what task i uses that task j uses as well.
        shared_by: how many weights are used by 0, 1, 2, ... tasks.
        frozen: after each task, the share of all weights that can't change any more (HAT, figure 5); empty in old records.
            It is `used`, but for HAT with `protect="paper"`.

    Example:
        >>> found = hr.Capacity(["digits", "signs"], used=[0.5, 0.75], own=[0.5, 0.5])
        >>> found.free, round(found.forecast, 1)
        (0.25, 2.3)
    """

    tasks: list[str]
    layers: list[LayerCapacity] = field(default_factory=list)
    used: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    reuse: list[list[float]] = field(default_factory=list)
    shared_by: list[int] = field(default_factory=list)
    frozen: list[float] = field(default_factory=list)

    @property
    def free(self) -> float:
        """The share of the weights that later tasks may still train."""
        return 1.0 - self._taken[-1] if self.used else 1.0

    @property
    def _taken(self) -> list[float]:
        return self.frozen or self.used

    @property
    def forecast(self) -> float:
        """How many more tasks like the last find more than a twentieth of the weights free; infinite if the last took none.

        Tasks take a share of what is free: HAT's and PMASK's capacity terms count only free units, and PackNet prunes a
        share of the free weights. So if the last task left the share k of what it found free, n more tasks leave k^n of it.
        """
        before = 1.0 - self._taken[-2] if len(self.used) > 1 else 1.0
        if not self.used or self.free >= before:
            return math.inf
        if self.free <= SCARCE:
            return 0.0
        return math.log(SCARCE / self.free) / math.log(self.free / before)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as a record keeps them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Capacity":
        """Return the capacity that `to_dict` described."""
        return cls(**{**data, "layers": [LayerCapacity(**layer) for layer in data["layers"]]})
