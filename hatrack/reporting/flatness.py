"""The figure of the flatness of runs: the curvature, the forgetting beside its bound, and the loss between two tasks."""

import io
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from hatrack.inspection.flatness import Flatness
from hatrack.reporting.drawing import MUTED, STYLE, LineStyle, line_style
from hatrack.reporting.looks import variants
from hatrack.text import shorten


def flatness_png(found: Mapping[str, Sequence[Flatness]], methods: Mapping[str, str]) -> bytes:
    """Return the figure of `draw_flatness` as a PNG file; every run has the look of its method, which `methods` names."""
    styles = {label: line_style(one) for label, one in variants(methods).items()}
    file = io.BytesIO()
    with style.context(STYLE):
        draw_flatness(found, styles).savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def draw_flatness(found: Mapping[str, Sequence[Flatness]], styles: Mapping[str, LineStyle]) -> Figure:
    """Draw the flatness of one or several runs.

    Args:
        found: what was measured by the names of the runs, an entry per seed; lines are means over seeds, and bands reach
            from the lowest seed to the highest.
        styles: how each run is drawn.

    Returns:
        The figure.
    """
    with style.context(STYLE):
        figure = Figure(figsize=(13.5, 4.2), layout="constrained")
        curvature, lost, between = figure.subplots(1, 3)
        for name, runs in found.items():
            colour, marker = styles[name].colour, styles[name].marker
            _band(curvature, _numbers(runs), [one.top for one in runs], colour, marker=marker)
            later = _numbers(runs)[1:]
            _band(lost, later, [one.forgetting[0][1:] for one in runs], colour, marker=marker)
            _band(lost, later, [one.bounds[0][1:] for one in runs], colour, line="--", marker=marker)
            if runs[0].lines:
                at = runs[0].lines[0].at
                _band(between, at, [one.lines[0].first for one in runs], colour, marker=marker)
                _band(between, at, [one.lines[0].second for one in runs], colour, line=":", marker=marker)
        _titles(curvature, "Largest eigenvalue at the end of a task", "task", log=True)
        _titles(lost, "Forgetting of task 1, and its bound", "tasks learned", log=True)
        _titles(between, "Loss between the ends of tasks 1 and 2", "place on the line")
        _legend(lost, {"measured": "-", "bound ½ λ |Δw|²": "--"})
        _legend(between, {"task 1": "-", "task 2": ":"})
        names = [shorten(name, 40) for name in found]
        lines = [Line2D([], [], color=styles[name].colour, marker=styles[name].marker) for name in found]
        figure.legend(lines, names, loc="outside lower center", ncols=min(4, len(names)), frameon=False)
    return figure


def _numbers(runs: Sequence[Flatness]) -> list[int]:
    return list(range(1, len(runs[0].tasks) + 1))


def _band(
    axes: Axes, x: Sequence[float], rows: Sequence[Sequence[float]], colour: str, *, line: str = "-", marker: str = ""
) -> None:
    """Draw the mean of several rows, and the band from the lowest to the highest."""
    values = np.array(rows, dtype=float)
    axes.plot(x, values.mean(0), line, color=colour, marker=marker, markevery=max(1, len(x) // 5))
    if len(rows) > 1:
        axes.fill_between(x, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0)


def _titles(axes: Axes, title: str, below: str, *, log: bool = False) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(below)
    drawn = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.get_lines() or [Line2D([], [])]])
    if log and (drawn > 0).all():
        axes.set_yscale("log")
        if drawn.max() < 100 * drawn.min():  # powers of ten alone would leave one number on the axis, or none
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    elif log:  # a task may have become better: its forgetting is negative, and linear near zero
        axes.set_yscale("symlog", linthresh=0.01)
    if log:  # plain numbers: the style reads no formulas
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}".replace("-", "\N{MINUS SIGN}")))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _legend(axes: Axes, lines: Mapping[str, str]) -> None:
    """Say what the kinds of lines mean."""
    handles = [axes.plot([], [], line, color=MUTED)[0] for line in lines.values()]
    axes.legend(handles, list(lines), frameon=False, fontsize=10)
