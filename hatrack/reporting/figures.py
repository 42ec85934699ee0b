"""The figures of a setting: the accuracy of every method as one task after another is learned."""

import warnings
from typing import Any, cast

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Affine2DBase, ScaledTranslation, blended_transform_factory

from hatrack.experiments import metrics
from hatrack.experiments.metrics import Matrix
from hatrack.experiments.record import Record
from hatrack.reporting.drawing import (
    MUTED,
    STYLE,
    LineStyle,
    Scale,
    cell_colours,
    line_style,
    scale_for,
)
from hatrack.reporting.looks import Look
from hatrack.reporting.references import counted_accuracy
from hatrack.reporting.svg import page_svg
from hatrack.reporting.tables import Setting
from hatrack.text import is_percent, shorten

MAX_LETTERS = 36  # of a name beside a line
THIN = 0.7  # of a line between numbers of tasks that do not follow each other
MAX_TASKS = 20  # in a matrix; of a longer sequence, evenly spaced tasks are shown


def static_lines(setting: Setting, name: str, looks: dict[str, Look]) -> str:
    """Return the average accuracy after every number of tasks as an SVG element, for readers without script."""
    with style.context(["default", STYLE]), warnings.catch_warnings():  # independent of the user's own matplotlib style
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # names in scripts that the font lacks
        figure = accuracy_lines(setting, {key: line_style(one) for key, one in looks.items()})
        return page_svg(figure, name, f"Average {setting.score} on the tasks so far against tasks learned")


def accuracy_lines(setting: Setting, styles: dict[str, LineStyle]) -> Figure:
    """Draw the average accuracy of every method after every number of tasks."""
    factor = 100 if is_percent(setting.score) else 1
    accuracy = {
        row.label: [factor * metrics.average_accuracies(counted_accuracy(record)) for record in setting.methods[row.label]]
        for row in setting.rows
    }
    lines = _without_distant_guessing(setting, accuracy)
    return draw_lines(lines, styles, axis_title(setting, "average {score}"), least=0.04 * factor)


def _is_random(setting: Setting, label: str) -> bool:
    return setting.methods[label][0].spec.method == "random"


def _without_distant_guessing(setting: Setting, lines: dict[str, list[Matrix]]) -> dict[str, list[Matrix]]:
    """Leave out the reference `random` if it is so far below the other lines that these could not be told apart."""
    random = {name for name in lines if _is_random(setting, name)}
    rest = np.array([value for name in lines if name not in random for value in lines[name]])
    rest = rest[~np.isnan(rest)]  # joint training may have been skipped after some tasks
    if not np.isfinite(rest).all() or not rest.size:
        return lines
    bound = rest.min() - 0.5 * (rest.max() - rest.min())
    return {name: group for name, group in lines.items() if name not in random or np.nanmax(group) > bound}


def draw_lines(lines: dict[str, list[Matrix]], styles: dict[str, LineStyle], title: str, least: float) -> Figure:
    """Draw a line per method: the mean over seeds, with a band of one standard deviation and the name at the end.

    The y axis spans at least `least`, so that differences too small to matter look small. Numbers of tasks at which a seed
    has no value are left out; the others are marked, and lines over a gap are thin.
    """
    tasks = len(next(iter(lines.values()))[0])
    inches = max(2.5, 0.22 * len(lines))  # the height of the axes; the names stand above each other beside them
    longest = max(len(shorten(name, MAX_LETTERS)) for name in lines)
    figure = Figure(figsize=(4.5 + 0.085 * longest, inches + 0.75), layout="constrained")
    axes = figure.add_subplot()
    ends: dict[str, tuple[int, float]] = {}  # by name, the last number of tasks and the value there
    for name, group in lines.items():
        values = np.stack(group)
        values[~np.isfinite(values)] = np.nan
        there = np.isfinite(values).all(0)
        mean, look, x = values[:, there].mean(0), styles[name], np.arange(1, tasks + 1)[there]
        axes.plot(x, mean, color=look.colour, linestyle=look.line, linewidth=THIN if (np.diff(x) > 1).any() else None,
                  marker=look.marker or ("." if tasks == 1 or not there.all() else ""),
                  markevery=max(1, tasks // 10) if there.all() else 1)  # fmt: skip
        if len(group) > 1:
            std = values[:, there].std(0, ddof=1)
            axes.fill_between(x, mean - std, mean + std, color=look.colour, alpha=0.16, linewidth=0)
        if len(x):
            ends[name] = int(x[-1]), float(mean[-1])
    low, high = axes.get_ylim()
    if high - low < least:
        axes.set_ylim((low + high - least) / 2, (low + high + least) / 2)
    _count_tasks(axes, tasks)
    axes.set_title(title, loc="left", fontsize=11, color=MUTED)
    _label_ends(axes, ends, styles, inches)
    return figure


def _count_tasks(axes: Axes, tasks: int) -> None:
    """Let the x axis count the tasks learned, from 1."""
    axes.set_xlim(1 - 0.04 * tasks, tasks + 0.04 * tasks)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axes.set_xlabel("tasks learned")
    axes.tick_params(length=0)


def _label_ends(axes: Axes, ends: dict[str, tuple[int, float]], styles: dict[str, LineStyle], inches: float) -> None:
    """Write the names beside the ends of the lines, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    names = sorted(ends, key=lambda name: ends[name][1])
    heights = move_apart([ends[name][1] for name in names], 0.2 / inches * (high - low), high)
    leader = {"arrowstyle": "-", "color": MUTED, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 2}
    assert isinstance(axes.figure, Figure)
    edge = ScaledTranslation(1, 0, cast("Affine2DBase", axes.transAxes))
    beside = blended_transform_factory(axes.figure.dpi_scale_trans + edge, axes.transData)  # inches from the axes
    for name, height in zip(names, heights, strict=True):
        axes.annotate("", ends[name], (0.24, height), textcoords=beside, arrowprops=leader)
        axes.text(0.72, height, shorten(name, MAX_LETTERS), transform=beside, va="center")
        look = styles[name]
        piece: dict[str, Any] = {"color": look.colour, "linestyle": look.line, "marker": look.marker}  # as in a legend
        axes.add_artist(Line2D((0.26, 0.45, 0.64), [height] * 3, **piece, markevery=[1], transform=beside, clip_on=False))


def move_apart(heights: list[float], gap: float, top: float) -> list[float]:
    """Move sorted heights as little as possible, so that neighbours are `gap` apart and none is above `top`.

    This is isotonic regression of height k minus k gaps.
    """
    blocks: list[list[float]] = []  # heights minus their gaps, in blocks with increasing means
    for k, height in enumerate(heights):
        blocks.append([height - k * gap])
        while len(blocks) > 1 and np.mean(blocks[-2]) >= np.mean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    levels = [float(np.mean(block)) for block in blocks for _ in block]
    highest = top - (len(heights) - 1) * gap  # the last label is then at the top
    return [min(level, highest) + k * gap for k, level in enumerate(levels)]


def mean_matrix(records: list[Record]) -> Matrix:
    """Return the accuracy matrix, averaged over seeds."""
    return np.mean([counted_accuracy(record) for record in records], axis=0)  # type: ignore[no-any-return]


def axis_title(setting: Setting, text: str) -> str:
    """Return the title of an axis: the text, with the name of the score in it, and its unit."""
    return text.format(score=setting.score) + (", %" if is_percent(setting.score) else "")


def scale_of(setting: Setting) -> Scale:
    """Return the scale of figures and colours: from below the lowest accuracy on a learned task, without the reference
    `random`."""
    groups = [group for name, group in setting.methods.items() if not _is_random(setting, name)]
    matrices = map(mean_matrix, groups or setting.methods.values())
    return scale_for(setting.score, np.concatenate([matrix[np.tril_indices(len(matrix))] for matrix in matrices]))


def shown_tasks(tasks: int) -> list[int]:
    """Return the tasks that a matrix shows: all, or evenly spaced ones with the first and the last."""
    return sorted({round(k) for k in np.linspace(0, tasks - 1, min(tasks, MAX_TASKS))})


def matrix_figure(setting: Setting, label: str) -> Figure:
    """Draw the accuracy matrix as a heat map."""
    shown, scale = shown_tasks(len(setting.tasks)), scale_of(setting)
    values = mean_matrix(setting.methods[label])[np.ix_(shown, shown)]
    names = [shorten(setting.tasks[k], 18) for k in shown]
    count = len(shown)
    figure = Figure(figsize=(1.6 + 0.52 * count, 1.7 + 0.36 * count), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlim=(0, count), ylim=(count, 0), title=shorten(label, 12 + 7 * count))
    for (t, i), value in np.ndenumerate(values):
        background, colour = cell_colours(value, scale.low, i > t, scale.high)
        axes.fill_between([i, i + 1], t, t + 1, color=background, edgecolor="white", linewidth=1)
        text = scale.text(value) if np.isfinite(value) else ""
        axes.text(i + 0.5, t + 0.5, text, color=colour, ha="center", va="center", fontsize=9)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set_xticks(np.arange(count) + 0.5, names, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(np.arange(count) + 0.5, names)
    axes.set_ylabel("after learning")
    axes.set_xlabel(axis_title(setting, "{score} on"))
    return figure
