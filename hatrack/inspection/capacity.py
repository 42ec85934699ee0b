"""Capacity and reuse (HAT, section 4.4): the weights that each task uses, those it shares with others, those still free.

A weight counts as used by a task if the mask of the task has it; for HAT, if the task's gates open both units that the
weight connects. Biases and norms are not counted.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from hatrack.inspection.layers import layer_titles, title_of
from hatrack.methods.fit import FitResult
from hatrack.methods.method import Method
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

    Attributes:
        tasks: the names of the tasks.
        layers: the same for every layer; see `LayerCapacity`.
        used: after each task, the share of all weights that the tasks so far use.
        own: the share of all weights that each task uses.
        reuse: entry [i][j] is the share of what task i uses that task j uses as well.
        shared_by: how many weights are used by 0, 1, 2, ... tasks.
    """

    tasks: list[str]
    layers: list[LayerCapacity] = field(default_factory=list)
    used: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    reuse: list[list[float]] = field(default_factory=list)
    shared_by: list[int] = field(default_factory=list)

    @property
    def free(self) -> float:
        """The share of the weights that no task uses."""
        return 1.0 - self.used[-1] if self.used else 1.0

    @property
    def forecast(self) -> float:
        """How many more tasks like the last find more than a twentieth of the weights free; infinite if the last took none.

        Tasks take a share of what is free: HAT's and PMASK's capacity terms count only free units, and PackNet prunes a
        share of the free weights. So if the last task left the share k of what it found free, n more tasks leave k^n of it.
        """
        before = 1.0 - self.used[-2] if len(self.used) > 1 else 1.0
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


@torch.no_grad()
def capacity(method: Method) -> Capacity:
    """Measure what the finished tasks of a method use.

    Args:
        method: HAT, PMASK, PackNet, or a method of your own with `weight_masks`.

    Returns:
        The capacity; without layers if the method has no masks.

    Example:
        >>> method = hr.HAT(hr.Network(trunk, tasks=tasks))
        >>> result = method.learn(tasks[0], hr.Trainer(hr.Regime(epochs=2)))
        >>> found = hr.capacity(method)
        >>> [layer.title for layer in found.layers], 0 < found.free < 1
        (['linear 1, 50 units'], True)
    """
    masks = [method.weight_masks(task) for task in method.history]
    names = list(method.history.values())
    chosen = [name for name, mask in masks[0].items() if mask.dim() > 1] if masks else []
    if not chosen:
        return Capacity(names)
    titles = layer_titles(method.net.trunk)
    count = len(names)
    both, layers = torch.zeros(count, count, dtype=torch.float64), []
    for name in chosen:
        rows = torch.stack([mask[name].reshape(-1) for mask in masks])
        both += _overlaps(rows)
        layers.append(_layer(name, title_of(name, titles), rows))
    total = sum(layer.weights for layer in layers)
    used = [sum(layer.used[t] * layer.weights for layer in layers) / total for t in range(count)]
    sizes = both.diagonal()
    return Capacity(
        tasks=names,
        layers=layers,
        used=used,
        own=(sizes / total).tolist(),
        reuse=(both / sizes.clamp(min=1)[:, None]).tolist(),
        shared_by=[sum(layer.shared_by[k] for layer in layers) for k in range(count + 1)],
    )


def _overlaps(rows: Tensor) -> Tensor:
    """Return how many entries two tasks have in common (tasks, tasks), given bools (tasks, weights)."""
    common = [[(one & other).sum() for other in rows] for one in rows]
    return torch.stack([torch.stack(row) for row in common]).double().cpu()


def _layer(name: str, title: str, rows: Tensor) -> LayerCapacity:
    weights, users = rows.shape[1], rows.sum(0)
    so_far, used = torch.zeros_like(rows[0]), []
    for row in rows:
        so_far = so_far | row
        used.append(int(so_far.sum()) / weights)
    return LayerCapacity(
        name=name,
        title=title,
        weights=weights,
        used=used,
        own=[int(row.sum()) / weights for row in rows],
        shared_by=torch.bincount(users.cpu(), minlength=len(rows) + 1).tolist(),
    )


class CapacityCurve:
    """Notes after every epoch the share of the weights that finished tasks and the present one use (HAT, figure 5).

    A `Trainer` calls it after each epoch; the shares are in `FitResult.used`.
    """

    def __init__(self) -> None:
        self.before: tuple[int, dict[str, Tensor]] = (-1, {})  # the task being learned, and what the others use

    @torch.no_grad()
    def __call__(self, method: Method, result: FitResult) -> None:
        """Add the share after an epoch to the result of the fit."""
        now = {name: mask for name, mask in method.weight_masks(result.task).items() if mask.dim() > 1}
        if not now:
            return
        if self.before[0] != result.task:
            others = [method.weight_masks(task) for task in method.history if task != result.task]
            union = {name: torch.stack([mask[name] for mask in others]).any(0) for name in now} if others else {}
            self.before = result.task, union
        used = sum(int((mask | self.before[1].get(name, mask)).sum()) for name, mask in now.items())
        result.used.append(used / sum(mask.numel() for mask in now.values()))
