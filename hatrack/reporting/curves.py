"""Figures over epochs: the validation accuracy of every fit, and the accuracy on every task after each epoch."""

from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hatrack.experiments.metrics import Matrix
from hatrack.experiments.record import Record
from hatrack.reporting.drawing import accuracy_panel, scale_for, task_colours
from hatrack.reporting.tables import Setting
from hatrack.text import is_percent

BORDER = "#cbd2d9"  # of the lines where tasks begin


def _fits(record: Record) -> list[tuple[int, Matrix, int]]:
    """Return for every fit its task, the validation accuracy of every epoch, in percent if it is one, and the best epoch."""
    factor = 100 if is_percent(record.score) else 1
    return [
        (curve.task, factor * np.array([epoch.valid_accuracy for epoch in curve.epochs], dtype=np.float64), curve.best)
        for curve in record.curves
        if curve.epochs
    ]


def training_curves(setting: Setting, label: str) -> Figure | None:
    """Draw the validation accuracy of every epoch at the method's first seed, fit after fit; None if there is none."""
    first = setting.methods[label][0]
    fits = _fits(first)
    if not any(np.isfinite(values).any() for _, values, _ in fits):
        return None
    factor = 100 if is_percent(setting.score) else 1
    everything = [values / factor for group in setting.methods.values() for _, values, _ in _fits(group[0])]
    figure, axes = accuracy_panel(label, 1.9, scale_for(setting.score, np.concatenate(everything)))
    colours = task_colours(len(setting.tasks))
    start = 0
    for task, values, best in fits:
        axes.plot(np.arange(start, start + len(values)) + 1, values, color=colours[task], linewidth=1.6)
        axes.plot(start + best + 1, values[best], "o", color=colours[task], markersize=4)
        axes.axvline(start + 0.5, color=BORDER, linewidth=0.6)
        start += len(values)
    seed = first.spec.seed
    _count_epochs(axes, start, "" if seed == setting.seeds[0] else f", seed {seed}")
    return figure


def _count_epochs(axes: Axes, epochs: int, which: str) -> None:
    """Let the x axis count the epochs of all fits, from 1."""
    axes.set_xlim(0.5, epochs + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, min_n_ticks=1))
    axes.grid(False, axis="x")
    axes.set_xlabel(f"epochs of all tasks{which}")


class Watched(NamedTuple):
    """The accuracy on every task after each epoch.

    Attributes:
        accuracy: (epochs of all fits, tasks).
        starts: the tasks that have fits, each with the number of its first epoch in `accuracy`.
    """

    accuracy: Matrix
    starts: dict[int, int]


def watched(record: Record) -> Watched | None:
    """Return the accuracies of a record in the order of its fits; None if it has none."""
    rows: list[list[float]] = []
    starts: dict[int, int] = {}
    for curve in record.curves:
        starts.setdefault(curve.task, len(rows))
        rows += curve.watched
    return Watched(np.array(rows, dtype=np.float64), starts) if rows else None


def mean_watched(records: list[Record]) -> tuple[Watched, str] | None:
    """Return the accuracies averaged over seeds, or those of the first seed if the seeds took different numbers of epochs.

    Returns:
        The accuracies, and which seed they are of as the end of a label; None if no record has any.
    """
    found = [(record, value) for record in records if (value := watched(record))]
    if not found:
        return None
    record, first = found[0]
    if all(value.accuracy.shape == first.accuracy.shape and value.starts == first.starts for _, value in found):
        return Watched(np.mean([value.accuracy for _, value in found], axis=0), first.starts), ""
    return first, f", seed {record.spec.seed}"


def _learned(value: Watched) -> Matrix:
    """Return the accuracies of every task since its first epoch, as one list."""
    return np.concatenate([value.accuracy[start:, task] for task, start in value.starts.items()])


def watched_tasks(setting: Setting, label: str) -> Figure | None:
    """Draw the accuracy on every task after each epoch: pale before the task is learned; None if it was not measured."""
    chosen = mean_watched(setting.methods[label])
    if chosen is None:
        return None
    everything = [_learned(one[0]) for group in setting.methods.values() if (one := mean_watched(group))]
    scale = scale_for(setting.score, np.concatenate(everything))
    (accuracy, starts), seed = chosen
    figure, axes = accuracy_panel(label, 2.2, scale)
    colours, x = task_colours(accuracy.shape[1]), np.arange(len(accuracy)) + 1
    every = max(1, round(len(starts) / 10))  # with many tasks, only some numbers are written
    for task, start in starts.items():
        axes.plot(x[: start + 1], scale.factor * accuracy[: start + 1, task], color=colours[task], linewidth=0.8, alpha=0.35)
        axes.plot(x[start:], scale.factor * accuracy[start:, task], color=colours[task], linewidth=1.6)
        axes.axvline(start + 0.5, color=BORDER, linewidth=0.6)
        if task % every == 0:
            place = axes.get_xaxis_transform()
            axes.text(start + 0.6, 1.0, str(task + 1), color=colours[task], fontsize=7.5, transform=place, va="bottom")
    _count_epochs(axes, len(accuracy), seed)
    return figure
