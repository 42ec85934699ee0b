"""Figures for papers: one column wide, with their fonts within them, under names that stay the same."""

import hashlib
import io
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hatrack.experiments import metrics
from hatrack.experiments.metrics import Matrix
from hatrack.experiments.record import Record
from hatrack.experiments.records import records
from hatrack.files.atomic import writable, write
from hatrack.reporting.capacity import capacity_panel
from hatrack.reporting.drawing import STYLE, LineStyle, line_styles, slugs
from hatrack.reporting.figures import axis_title, matrix_figure
from hatrack.reporting.references import counted_accuracy
from hatrack.reporting.response import draw_response_figure
from hatrack.reporting.sweeps import responses
from hatrack.reporting.tables import Setting, settings
from hatrack.text import is_percent, shorten

Kind = Literal["accuracy", "forgetting", "matrix", "capacity", "sweep"]
Format = Literal["pdf", "svg", "png"]
COLUMN = 3.4  # inches: one column of a paper
PAPER: dict[str, Any] = {
    **STYLE,
    "font.size": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.2,
    "pdf.fonttype": 42,  # TrueType within the file: publishers refuse Type 3
    "svg.fonttype": "path",  # letters as outlines: no font is needed to see them
    "savefig.dpi": 300,
}
METADATA: dict[str, dict[str, None]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {"Software": None}}


def paper_figures(folder: Path | str, kind: Kind, form: Format = "pdf", out: Path | str | None = None) -> list[Path]:
    """Draw figures of the records in a folder.

    Args:
        folder: the folder of the records.
        kind: "accuracy" or "forgetting" after each number of tasks, the accuracy "matrix" or the "capacity" of every method,
            or the response of methods to options that were varied ("sweep").
        form: "pdf", "svg" or "png".
        out: the folder of the figures; by default `folder`/figures.

    Returns:
        The paths of the files. Their names hold the benchmark, a hash of the setting, the kind and the method, so that the
        same figure has the same name, whatever else is in the folder.

    Raises:
        ValueError: there are no records, or none that such a figure could show.
    """
    found = records(folder)
    target = writable(Path(out or Path(folder) / "figures"))
    written = []
    with style.context(["default", PAPER]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        for name, figure in _figures(found, kind):
            content = io.BytesIO()
            figure.savefig(content, format=form, metadata=METADATA[form])
            written.append(target / f"{name}.{form}")
            write(written[-1], content.getvalue())
    if not written:
        raise ValueError(f"no record in {folder} has what a figure of {kind} shows; {NEEDS[kind]}")
    return written


NEEDS = {
    "accuracy": "hatrack run makes records",
    "forgetting": "a run needs at least two tasks",
    "matrix": "hatrack run makes records",
    "capacity": "methods with masks have it: hat, pmask and packnet",
    "sweep": "hatrack sweep varies options",
}


def _figures(found: Sequence[Record], kind: Kind) -> Iterator[tuple[str, Figure]]:
    if kind == "sweep":
        for response in responses(found):
            (name,) = slugs([response.title])
            yield f"{name}-{_hash(sorted(response.axes))}-sweep", draw_response_figure(response, (2 * COLUMN, 2.6))
        return
    groups = settings(found)
    styles = line_styles(groups)
    for setting in groups:
        (benchmark,) = slugs([setting.spec.benchmark])
        prefix = f"{benchmark}-{_hash(setting.common)}-{kind}"
        if kind in ("accuracy", "forgetting"):
            if figure := _lines(setting, kind, styles):
                yield prefix, figure
            continue
        panel: Callable[[Setting, str], Figure | None] = matrix_figure if kind == "matrix" else capacity_panel
        for label, name in zip(setting.methods, slugs(list(setting.methods)), strict=True):
            if drawn := panel(setting, label):
                drawn.set_size_inches(COLUMN, drawn.get_figheight() * COLUMN / drawn.get_figwidth())
                yield f"{prefix}-{name}", drawn


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:6]


def forgetting_after(accuracy: Matrix) -> Matrix:
    """Return the forgetting after 2, 3, ... tasks, of the upper left parts of an accuracy matrix."""
    return np.array([metrics.forgetting(accuracy[:t, :t]) for t in range(2, len(accuracy) + 1)])


def _lines(setting: Setting, kind: Kind, styles: dict[str, LineStyle]) -> Figure | None:
    """Draw a line per method: means over seeds, with bands of one standard deviation."""
    tasks, factor = len(setting.tasks), 100 if is_percent(setting.score) else 1
    if kind == "forgetting" and tasks < 2:
        return None
    compute = metrics.average_accuracies if kind == "accuracy" else forgetting_after
    first = 1 if kind == "accuracy" else 2
    names = [row.label for row in setting.rows if row.label != "random"]
    lines = -(-len(names) // 3)
    figure = Figure(figsize=(COLUMN, 2.2 + 0.16 * lines), layout="constrained")
    axes = figure.add_subplot()
    for name in names:
        values = factor * np.stack([compute(counted_accuracy(record)) for record in setting.methods[name]])
        mean, look, x = values.mean(0), styles[name], np.arange(first, tasks + 1)
        axes.plot(x, mean, color=look.colour, linestyle=look.line, marker=look.marker, label=shorten(name, 24),
                  markevery=max(1, len(x) // 10))  # fmt: skip
        if len(values) > 1:
            std = values.std(0, ddof=1)
            axes.fill_between(x, mean - std, mean + std, color=look.colour, alpha=0.16, linewidth=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    axes.set_xlabel("tasks learned")
    text = "average {score}" if kind == "accuracy" else "forgetting of {score}"
    axes.set_ylabel(axis_title(setting, text))
    figure.legend(loc="outside lower center", ncols=3, frameon=False, handlelength=1.6, columnspacing=1.0)
    return figure
