"""Flatness and forgetting (004): how curved the losses of tasks are, how far later tasks move, and what that makes forget.

The forgetting of task i after task j is F = L_i(w_j) - L_i(w_i), with the training loss L_i of task i and the weights w_j at
the end of task j. To second order, with d = w_j - w_i, the gradient g and the Hessian H of L_i at w_i,

    F = g d + 1/2 d H d,  and at a minimum, where g = 0,  F = 1/2 d H d <= 1/2 lambda |d|^2

with the largest eigenvalue lambda of H.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np


@dataclass(frozen=True)
class Line:
    """The losses of two tasks along the straight line between the weights at their ends, on training data.

    Attributes:
        at: places on the line, from 0 (the end of the first of the two tasks) to 1 (the end of the second).
        first: the loss of the first of the two tasks there.
        second: the loss of the second.
    """

    at: list[float]
    first: list[float]
    second: list[float]


@dataclass(frozen=True)
class Flatness:
    """How curved the training loss of every task is at its end, how far the weights moved since, and what was forgotten.

    Rows of triangles: row i is about task i, with an entry for the end of task i, of task i + 1, and so on to the last.

    Args:
        tasks: the names of the tasks, in the order of learning.
        parameters: how many parameters tasks share.
        images: on how many training images of every task the losses were measured.
        eigenvalues: for every task the largest eigenvalues of the Hessian of its loss at its end, the largest first.
        errors: how far these may be from eigenvalues of the Hessian.
        gradients: for every task the norm of the gradient of its loss at its end.
        distances: a triangle: how far the shared parameters are from where they were at the end of task i.
        losses: a triangle: the loss of task i.
        linear: a triangle: g d, the part of the forgetting to first order.
        quadratic: a triangle: 1/2 d H d, the part to second order.
        lines: the losses on the line between the ends of each task and the next.

    Example:
        >>> triangles = {"distances": [[0.0, 3.0], [0.0]], "losses": [[0.5, 9.5], [0.1]]}
        >>> found = hr.Flatness(["digits", "signs"], 2, [9, 9], [[4.0], [1.0]], **triangles)
        >>> found.forgetting[0], found.bounds[0]
        ([0.0, 9.0], [0.0, 18.0])
    """

    tasks: list[str]
    parameters: int
    images: list[int]
    eigenvalues: list[list[float]]
    errors: list[list[float]] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)
    distances: list[list[float]] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    linear: list[list[float]] = field(default_factory=list)
    quadratic: list[list[float]] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)

    @property
    def top(self) -> list[float]:
        """The largest eigenvalue of every task."""
        return [values[0] for values in self.eigenvalues]

    @property
    def moved(self) -> list[float]:
        """How far the shared parameters moved from the end of each task to the end of the next."""
        return [row[1] for row in self.distances[:-1]]

    @property
    def forgetting(self) -> list[list[float]]:
        """A triangle: by how much the training loss of task i has grown since its end."""
        return [[loss - row[0] for loss in row] for row in self.losses]

    @property
    def bounds(self) -> list[list[float]]:
        """A triangle: 1/2 lambda |d|^2, the bound on the forgetting to second order at a minimum."""
        return [[0.5 * top * d**2 for d in row] for top, row in zip(self.top, self.distances, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as a file keeps them."""
        return {**asdict(self), "moved": self.moved, "forgetting": self.forgetting, "bounds": self.bounds}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Flatness":
        """Return the flatness that `to_dict` described."""
        own = {name: value for name, value in data.items() if name in cls.__dataclass_fields__}
        return cls(**{**own, "lines": [Line(**line) for line in data["lines"]]})


CORRELATIONS = {  # what `correlations` returns, in words
    "eigenvalue": "forgetting of a task at the end, and its largest eigenvalue",
    "fixed": "forgetting of a task by the next, over the squared distance moved, and its largest eigenvalue",
    "distance": "forgetting of task 1 by task 2, and the distance moved in task 2",
    "second": "forgetting of task 2 after later tasks, and the distance from its end",
    "next": "distance moved in a task, and its own largest eigenvalue",
}


class Correlation(NamedTuple):
    """The correlation of pairs of numbers.

    Attributes:
        pairs: how many there are.
        pearson: the linear correlation; not a number with fewer than three pairs, or if one side has one value only.
        spearman: the correlation of the ranks.
    """

    pairs: int
    pearson: float
    spearman: float

    def __str__(self) -> str:
        if math.isnan(self.pearson):
            return f"no correlation of {self.pairs} {'pair' if self.pairs == 1 else 'pairs'}"
        return f"correlation {self.pearson:.2f}, of ranks {self.spearman:.2f} ({self.pairs} pairs)"


def correlations(found: Sequence[Flatness]) -> dict[str, Correlation]:
    """Return how forgetting goes together with curvature and distance, over all tasks of one or several runs.

    Args:
        found: what was measured, one per run.

    Returns:
        By name: "eigenvalue", the forgetting of every task but the last at the end of the run and its largest eigenvalue;
        "fixed", the same for a fixed distance: the forgetting by the next task, divided by the square of the distance that
        it moved, and the largest eigenvalue, without tasks in which nothing moved;
        "distance", the forgetting of the first task by the second, and the distance moved in the second, a pair per run;
        "second", the forgetting of the second task after every later one, and the distance from its end;
        "next", the distance moved in every task but the first, and that task's own largest eigenvalue.
    """
    curved = [(top, row[-1]) for one in found for top, row in list(zip(one.top, one.forgetting, strict=True))[:-1]]
    fixed = [
        (top, row[1] / d**2) for one in found for top, row, d in zip(one.top, one.forgetting, one.moved, strict=False) if d
    ]
    moved = [(one.moved[0], one.forgetting[0][1]) for one in found if len(one.tasks) > 1]
    second = [
        pair for one in found if len(one.tasks) > 2 for pair in zip(one.distances[1][1:], one.forgetting[1][1:], strict=True)
    ]
    later = [pair for one in found for pair in zip(one.top[1:], one.moved, strict=True)]
    pairs = {"eigenvalue": curved, "fixed": fixed, "distance": moved, "second": second, "next": later}
    return {key: correlation(group) for key, group in pairs.items()}


def correlation(pairs: Sequence[tuple[float, float]]) -> Correlation:
    """Return the correlation of pairs of numbers."""
    if len(pairs) < 3:
        return Correlation(len(pairs), math.nan, math.nan)
    values = np.array(pairs, dtype=np.float64).T  # (2, pairs)
    return Correlation(len(pairs), _pearson(values), _pearson(np.stack([_ranks(row) for row in values])))


def _pearson(values: np.ndarray) -> float:
    if not np.isfinite(values).all() or (np.ptp(values, axis=1) == 0).any():
        return math.nan
    return float(np.corrcoef(values)[0, 1])


def _ranks(row: np.ndarray) -> np.ndarray:
    """Return the rank of every number; equal ones have the mean of their ranks."""
    return np.array([(row < value).sum() + 0.5 * ((row == value).sum() - 1) for value in row])
