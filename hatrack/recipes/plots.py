"""Figures of recipes: lines against tasks, sweeps of an option, the accuracy of every task by epoch or by method."""

import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from hatrack.experiments import metrics
from hatrack.experiments.metrics import Matrix
from hatrack.experiments.record import Record
from hatrack.recipes.quantities import Quantity
from hatrack.recipes.recipe import Part, Plot, Row
from hatrack.recipes.results import Results
from hatrack.reporting.compression import draw_sizes, points
from hatrack.reporting.drawing import MUTED, PALETTE, STYLE, TEXT, Drawing, LineStyle, line_style, render, task_colours
from hatrack.reporting.figures import draw_lines
from hatrack.reporting.flatness import draw_flatness
from hatrack.reporting.looks import DASHES, METHOD_LOOKS, Look, told_apart, variants
from hatrack.reporting.measures import MeanStd


def draw(plot: Plot, results: Results, name: str, *, rendered: bool = True) -> Drawing | None:
    """Render a figure of a part, or only tell its name; None if the records for it are not there."""
    with style.context(["default", STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Mean of empty slice")
        figure = plot.draw(results)
        if figure is None or not rendered:
            return Drawing("recipe", "", name, "", b"") if figure else None
        return render("recipe", "", name, figure, plot.title)


# Lines against the number of tasks


def ratio_lines(name: str = "ratio", title: str = "Forgetting ratio against tasks learned") -> Plot:
    """Return the plot of the forgetting ratio of every row after every number of tasks."""
    return Plot(name, title, lambda results: _lines(results, _ratio_values(results), "forgetting ratio ρ≤t", 0.04))  # noqa: RUF001


def accuracy_lines(name: str = "accuracy", title: str = "Average accuracy against tasks learned") -> Plot:
    """Return the plot of the average accuracy of every row on the tasks so far."""
    return value_lines(name, title, "average accuracy, %", lambda record: 100 * metrics.average_accuracies(record.accuracy))


def value_lines(name: str, title: str, axis: str, value: Callable[[Record], Matrix]) -> Plot:
    """Return the plot of a percentage of every row after every number of tasks.

    Args:
        name: of the file.
        title: of the figure.
        axis: what is shown.
        value: returns it for a record, as many values as there are tasks.
    """

    def lines(results: Results) -> dict[str, list[Matrix]]:
        records = {label: results.records(label) for label, row in results.rows.items() if not row.reference}
        found = {label: [value(record) for record in group] for label, group in records.items()}
        most = max((len(line) for group in found.values() for line in group), default=0)
        return {label: [_padded(line, most) for line in group] for label, group in found.items()}

    return Plot(name, title, lambda results: _lines(results, lines(results), axis, 4))


def _padded(line: Matrix, length: int) -> Matrix:
    return np.pad(line, (0, length - len(line)), constant_values=np.nan)


def flatness_lines(name: str = "spectrum", labels: Sequence[str] = ()) -> Plot:
    """Return the plot of the flatness of every row that has it, or of the rows of these labels."""

    def figure(results: Results) -> Figure | None:
        found = {label: runs for label in labels or results.rows if (runs := results.flatness_of(label))}
        return draw_flatness(found, styles(results)) if found else None

    return Plot(name, "Curvature, forgetting with its bound, and the loss between two tasks", figure)


def _ratio_values(results: Results) -> dict[str, list[Matrix]]:
    return {label: results.ratios(label) for label, row in results.rows.items() if not row.reference}


def _lines(results: Results, values: Mapping[str, list[Matrix]], title: str, least: float) -> Figure | None:
    found = {label: fullest(group) for label, group in values.items() if group and np.isfinite(group).any()}
    if not found:
        return None
    fewer = any(len(group) < len(values[label]) for label, group in found.items())
    return draw_lines(found, styles(results), title + (", seeds with references" if fewer else ""), least=least)


def fullest(group: list[Matrix]) -> list[Matrix]:
    """Return the lines of the seeds that have most values, so that every point of a line is a mean over the same seeds."""
    counts = [int(np.isfinite(line).sum()) for line in group]
    return [line for line, count in zip(group, counts, strict=True) if count == max(counts)]


def styles(results: Results) -> dict[str, LineStyle]:
    """Return a style for every row by its label: that of its method, as on the page of a report."""
    return {label: line_style(one) for label, one in row_looks(results.part).items()}


def row_looks(part: Part) -> dict[str, Look]:
    """Return the looks of the rows of a part by their labels: those of their methods, with other dashes if methods share a
    hue, since markers alone are hard to follow where lines cross."""
    lines = part.plots and all(row.x is None for row in part.rows)  # rows of a sweep are points of one line
    counts: dict[str, int] = {}
    found: dict[str, Look] = {}
    for label, one in (told_apart if lines else variants)({row.label: row.run.method for row in part.rows}).items():
        hue, _ = METHOD_LOOKS.get(part.rows[len(found)].run.method, ("", ""))
        counts[hue] = counts.get(hue, -1) + 1
        found[label] = one._replace(dash=list(DASHES)[counts[hue] % len(DASHES)]) if hue else one
    return found


# Accuracy against size


def size_dots(name: str, title: str, pairs: Mapping[str, tuple[str, str]]) -> Plot:
    """Return the plot of the accuracy against the weights in use after every epoch, beside plain SGD.

    Args:
        name: of the file.
        title: above the figure.
        pairs: by name of a task the labels of two rows: of the method with gates, and of plain SGD.
    """

    def drawn(results: Results) -> Figure | None:
        found = {task: (results.records(gated), results.records(plain)) for task, (gated, plain) in pairs.items()}
        shown = {task: both for task, both in found.items() if any(map(points, both[0]))}
        return draw_sizes(shown) if shown else None

    return Plot(name, title, drawn)


# Sweeps


def sweep(name: str, title: str, option: str, quantity: Quantity, groups: Sequence[str] = ("",)) -> Plot:
    """Return the plot of a quantity against the option that the rows of a part sweep.

    Args:
        name: of the file.
        title: of the figure.
        option: the name of the x axis, which is logarithmic.
        quantity: the y axis.
        groups: rows whose labels begin so are joined by a line.
    """

    def figure(results: Results) -> Figure | None:
        found = Figure(figsize=(4.8 if len(groups) == 1 else 6.4, 3.1), layout="constrained")
        axes = found.add_subplot()
        axes.set_xscale("log")  # first: it would forget the ticks
        points = {group: _sweep_points(results, group, quantity) for group in groups}
        looks = {group: one for group, one in group_looks(results, groups).items() if len(points[group]) > 1}
        places = 1.04 ** (np.arange(len(looks)) - (len(looks) - 1) / 2)  # beside each other, so that bars do not hide bars
        for (group, look), place in zip(looks.items(), places.tolist(), strict=True):
            _sweep_line(axes, points[group], quantity, look, place, group.strip(" ,"))
        ticks = sorted({x for group in looks for x, _ in points[group]})
        axes.set_xticks(ticks, [f"{value:g}" for value in ticks], minor=False)
        axes.set_xticks([], minor=True)
        if quantity.measure.unit == "ratio":  # 0 is the reference: without it noise would look like an effect
            axes.set_ylim(top=max(0.0, axes.get_ylim()[1]))
        axes.set_xlabel(option)
        title = quantity.measure.title
        _title(axes, title[:1].lower() + title[1:] + (", %" if quantity.measure.unit == "%" else ""))
        if len(groups) > 1 and looks:
            axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
        return found if looks else None

    return Plot(name, title, figure)


def _group_rows(results: Results, group: str) -> list[Row]:
    return [row for row in results.part.rows if row.x is not None and row.label.startswith(group)]


def group_looks(results: Results, groups: Sequence[str]) -> dict[str, LineStyle]:
    """Return how every group of a sweep is drawn: as the method of its rows, unless all are of one."""
    methods = {group: rows[0].run.method for group in groups if (rows := _group_rows(results, group))}
    return {group: line_style(one) for group, one in told_apart(methods).items()}


def _sweep_points(results: Results, group: str, quantity: Quantity) -> list[tuple[float, MeanStd]]:
    """Return x and value of the rows of a group that have one; a single one is no sweep."""
    rows = [(row.x, results.summary(row.label, quantity)) for row in _group_rows(results, group)]
    return [(x, value) for x, value in rows if x is not None and value]


def _sweep_line(
    axes: Axes, points: list[tuple[float, MeanStd]], quantity: Quantity, look: LineStyle, place: float, label: str
) -> None:
    """Draw the points of a group, at their x times `place`."""
    scale = 100 if quantity.measure.unit == "%" else 1
    x, mean = np.array([x for x, _ in points]), [scale * value.mean for _, value in points]
    std = [np.nan if value.std is None else scale * value.std for _, value in points]  # one run has no bar
    axes.errorbar(place * x, mean, std, color=look.colour, linestyle=look.line, marker=look.marker, capsize=3,
                  label=label or None)  # fmt: skip


# Tasks


def tasks_by_epoch(label: str, name: str, title: str, low: float = 100.0) -> Plot:
    """Return the plot of the accuracy of every task after each epoch of a row, the mean over its seeds (002); its y axis
    begins at `low` or below, so that figures beside each other are alike."""

    def figure(results: Results) -> Figure | None:
        runs = [[row for curve in r.curves for row in curve.watched or ()] for r in results.records(label)]
        runs = [run for run in runs if run]
        if not runs:
            return None
        records = [r for r in results.records(label) if r.curves[0].watched]
        length = min(map(len, runs))
        values = 100 * np.array([run[:length] for run in runs], dtype=np.float64)  # (seeds, epochs, tasks)
        starts = np.cumsum([0, *(len(curve.epochs) for curve in records[0].curves)])
        found = Figure(figsize=(6.2, 3.0), layout="constrained")
        axes = found.add_subplot()
        for k, colour in enumerate(task_colours(values.shape[2])):
            x, mean = np.arange(starts[k], length) + 1, values[:, starts[k] :, k].mean(0)
            axes.plot(x, mean, color=colour, linewidth=1.6, label=f"task {k + 1}")
            if len(runs) > 1:
                std = values[:, starts[k] :, k].std(0, ddof=1)
                axes.fill_between(x, mean - std, mean + std, color=colour, alpha=0.16, linewidth=0)
        for start in starts[1:-1]:
            axes.axvline(start + 0.5, color="#9aa5b1", linewidth=0.7, linestyle=":")
        axes.set_ylim(bottom=min(low, axes.get_ylim()[0]))
        axes.set_xlabel("epochs of all tasks")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
        _title(axes, f"{label}: test accuracy of every task, %")
        return found

    return Plot(name, title, figure)


def accuracy_by_task(name: str, title: str) -> Plot:
    """Return the plot of the accuracy at the end on every task, a line per row (003)."""

    def figure(results: Results) -> Figure | None:
        found = Figure(figsize=(6.2, 3.2), layout="constrained")
        axes = found.add_subplot()
        tasks = 0
        for label, look in styles(results).items():
            if not results.rows[label].reference and (records := results.records(label)):
                values = 100 * np.array([r.accuracy[-1] for r in records], dtype=np.float64)
                tasks = values.shape[1]
                x = np.arange(1, tasks + 1)
                axes.plot(x, values.mean(0), color=look.colour, linestyle=look.line, marker=look.marker, label=label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("task")
        if not tasks:
            return None
        axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
        _title(axes, "accuracy at the end, %")
        return found

    return Plot(name, title, figure)


def curves(name: str, title: str, lines: Callable[[], Mapping[str, tuple[Matrix, Matrix]]], axis: str) -> Plot:
    """Return the plot of curves that need no run, by name as x and y, on a logarithmic axis."""

    def figure(results: Results) -> Figure:
        found = Figure(figsize=(6.4, 3.1), layout="constrained")
        axes = found.add_subplot()
        for (label, (x, y)), colour in zip(lines().items(), (TEXT, *PALETTE), strict=False):
            axes.plot(x, y, color=colour, label=label)
        axes.set_xlabel(axis)
        axes.set_yscale("log")
        axes.set_ylim(1e-5, 500)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
        _title(axes, "gradient gathered in one epoch, per batch")
        return found

    return Plot(name, title, figure)


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=11, color=MUTED)
