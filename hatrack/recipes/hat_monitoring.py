"""Figures 5 and 6 of HAT (001, section 4.4): the capacity that tasks take one after the other, and what they reuse."""

import math
from itertools import pairwise

import numpy as np

from hatrack.experiments.metrics import Matrix
from hatrack.experiments.record import Record
from hatrack.experiments.spec import Run
from hatrack.inspection.capacity import Capacity
from hatrack.recipes.grids import PERCENT
from hatrack.recipes.plots import value_lines
from hatrack.recipes.pmask import five_tasks
from hatrack.recipes.quantities import Quantity
from hatrack.recipes.recipe import Grid, Part, Row
from hatrack.recipes.results import Results
from hatrack.reporting.measures import Measure, format_number

ALEXNET = {
    "0": 3 * 64 * 16,
    "4": 64 * 128 * 9,
    "8": 128 * 256 * 4,
    "13": 1024 * 2048,
    "16": 2048 * 2048,
}  # weights of layers


def frozen_shares(record: Record) -> Matrix:
    """Return the share of the weights that are frozen after each task of HAT (Eq. 2), NaN where it is not known.

    Records of older versions have the units in use only. In AlexNet, whose layers follow each other, a weight is frozen if
    its units on both sides are in use, so that the shares of two layers are multiplied.
    """
    if frozen := Capacity.from_dict(record.weights_used).frozen if record.weights_used else []:
        return np.array(frozen)
    if record.spec.network != "alexnet" or not record.usage:
        return np.full(len(record.tasks), math.nan)
    weights = np.array(list(ALEXNET.values()), dtype=float)
    units = [[1.0, *(after[name] for name in ALEXNET)] for after in record.usage]  # of the image and of every layer
    shares: Matrix = np.array([[a * b for a, b in pairwise(row)] for row in units]) @ weights / weights.sum()
    return shares


def frozen_after(tasks: int) -> Quantity:
    """Return the share of the weights that are frozen after a number of tasks."""
    title = f"Capacity in use after {tasks} task{'s' * (tasks > 1)}"
    measure = Measure(f"frozen_{tasks}", title, "%", "The share of frozen weights (Eq. 2).")
    return Quantity(measure, lambda record, _: _entry(frozen_shares(record), tasks - 1))


def _entry(values: Matrix, place: int) -> float:
    return float(values[place]) if place < len(values) else math.nan


def reuse(results: Results) -> Grid | None:
    """Return what share of the weights of a task each later one uses as well, at the first seed that has it (figure 6)."""
    for label in results.rows:
        for record in results.records(label):
            if record.weights_used:
                found = Capacity.from_dict(record.weights_used)
                count = len(found.tasks)
                rows = [
                    [
                        f"{i + 1} {found.tasks[i]}",
                        *(format_number(PERCENT, found.reuse[i][j]) if j > i else "" for j in range(1, count)),
                    ]
                    for i in range(count - 1)
                ]
                title = f"Figure 6: of the weights of a task (rows), % that a later one uses as well; {label}, "
                return Grid(title + f"seed {record.spec.seed}", ["task", *(f"task {j + 1}" for j in range(1, count))], rows)
    return None


MONITORING = Part(
    "monitoring",
    "Figures 5 and 6: network capacity and reuse",
    "Capacity in use is the share of the weights whose units on both sides are in use by any of the tasks so far, so that "
    "they are frozen. Figure 5 of the paper has it after every epoch; so have runs with --watch-tasks. hatrack inspect "
    "shows both for any run, and layer by layer.",
    (
        Row("eight data sets", Run("mixture-open", "hat"), (0, 1, 2), joint=()),
        Row("ten tasks of CIFAR", Run("cifar", "hat"), (0, 1, 2), joint=()),
        Row("CIFAR-100 in five tasks, 60 epochs", five_tasks("cifar100-5", "hat"), (0, 1, 2), joint=()),
    ),
    tuple(frozen_after(tasks) for tasks in (1, 2, 5, 8, 10)),
    plots=(
        value_lines(
            "capacity",
            "Figure 5: capacity in use against tasks learned",
            "capacity in use, %",
            lambda record: 100 * frozen_shares(record),
        ),
    ),
    grids=(reuse,),
)
