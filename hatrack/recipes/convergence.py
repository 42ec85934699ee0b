"""The figure of how fast tasks are learned: accuracy on validation data after every epoch, by schedule and learning rate."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hatrack.experiments.metrics import Matrix
from hatrack.experiments.record import Record
from hatrack.recipes.plots import group_looks
from hatrack.recipes.recipe import Plot
from hatrack.recipes.results import Results
from hatrack.reporting.drawing import MUTED


def validation_curves(name: str, title: str, task: int, groups: Sequence[str]) -> Plot:
    """Return the plot of the validation accuracy after every epoch of a task: a panel per place on the x axis of a sweep.

    Args:
        name: of the file.
        title: of the figure.
        task: the task, counted from 1.
        groups: rows whose labels begin so have one colour, that of the sweep.
    """

    def figure(results: Results) -> Figure | None:
        found = {row.label: _curves(results.records(row.label), task) for row in results.part.rows}
        places = sorted({row.x for row in results.part.rows if row.x is not None and len(found[row.label])})
        if not places:
            return None
        looks = group_looks(results, groups)
        drawn = Figure(figsize=(2.6 * len(places) + 2, 3.1), layout="constrained")
        panels = drawn.subplots(1, len(places), sharey=True, squeeze=False)[0]
        for axes, x in zip(panels, places, strict=True):
            for group, look in looks.items():
                rows = [row for row in results.part.rows if row.x == x and row.label.startswith(group)]
                for values in (found[row.label] for row in rows if len(found[row.label])):
                    epochs = np.arange(values.shape[1]) + 1
                    axes.plot(epochs, 100 * values.mean(0), color=look.colour, linestyle=look.line, linewidth=1.6,
                              label=group)  # fmt: skip
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set_xlabel(f"epochs of task {task}")
            axes.set_title(f"learning rate {x:g}", loc="left", fontsize=11, color=MUTED)
        panels[0].set_ylabel("validation accuracy, %")
        panels[-1].legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
        return drawn

    return Plot(name, title, figure)


def _curves(records: Sequence[Record], task: int) -> Matrix:
    """Return the validation accuracy after every epoch of a task, a row per seed; no rows if there is no such data."""
    runs = [[point.valid_accuracy for c in record.curves if c.task == task - 1 for point in c.epochs] for record in records]
    whole = [run for run in runs if run and None not in run]
    length = min(map(len, whole), default=0)
    return np.array([run[:length] for run in whole], dtype=np.float64)
