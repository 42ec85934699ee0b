"""The compression of one task (HAT, section 4.4, figure 7): accuracy against the share of the weights in use, by epoch."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.table import Table
from rich.text import Text

from hatrack.experiments.record import Record
from hatrack.reporting.drawing import MARKERS, MUTED, PALETTE, STYLE, Drawing, line_style, render
from hatrack.reporting.looks import look, variants
from hatrack.reporting.measures import MISSING, Measure, format_number, format_std, mean_std, measure_of
from hatrack.reporting.tables import label
from hatrack.reporting.templating import plain_page
from hatrack.text import is_percent, printable

QUOTED = (  # by HAT's authors, section 4.4; sizes in % of the weights
    "quoted by Serrà et al. 2018, not measured here: PackNet keeps 25 or 50 % of the weights; DEN 18 % on MNIST and 52 % on "
    "CIFAR-100;",
    "for HAT with c = 1.5 and embeddings from U(0, 2) they report 1 % on MNIST, 21 % on CIFAR-100, 1 to 21 % on eight sets",
)
LINES = {"PackNet, quoted": (0.25, 0.5), "DEN on MNIST and CIFAR-100, quoted": (0.18, 0.52)}
SIZE = Measure("size", "Weights in use", "%", "The share of the trunk's weights that the task uses at the end.")
SMALLEST = 1e-3  # share of the weights on the axis of the figure, which is logarithmic


class Point(NamedTuple):
    """An epoch: the share of the weights in use after it, and the score on validation (or, without it, test) data."""

    size: float
    accuracy: float


@dataclass(frozen=True)
class Compression:
    """The records of one task, an entry per seed: of a method with gates, and of plain SGD.

    Attributes:
        title: the task and the network.
        gated: the records of the method with gates.
        plain: the records of plain SGD.
    """

    title: str
    gated: list[Record]
    plain: list[Record]

    @property
    def score(self) -> str:
        """The name of the score of the task: "accuracy", or another one."""
        return self.gated[0].score


def size(record: Record) -> float:
    """Return the share of the weights that the only task of a record uses at the end; 1 for a method without masks."""
    return float(record.weights_used["own"][0]) if record.weights_used else 1.0


def valid_accuracy(record: Record) -> float:
    """Return the accuracy on validation data of the weights that were kept; NaN without such data."""
    return record.valid_average


def data_shown(records: Sequence[Record]) -> str:
    """Return on which data the scores of epochs are: validation, or test where there is none; both if records differ."""
    without = {math.isnan(valid_accuracy(record)) for record in records}
    return " or ".join("test" if none else "validation" for none in sorted(without)) or "validation"


def points(record: Record) -> list[Point]:
    """Return the epochs of the only task of a record that was watched."""
    found = []
    for curve in record.curves:
        sizes = curve.used or [1.0] * len(curve.epochs)
        watched: Sequence[Sequence[float | None]] = curve.watched or [[None]] * len(curve.epochs)
        for epoch, used, (tested, *_) in zip(curve.epochs, sizes, watched, strict=True):
            accuracy = tested if epoch.valid_accuracy is None else epoch.valid_accuracy
            found += [] if accuracy is None else [Point(used, accuracy)]
    return found


def _rows(found: Compression) -> dict[str, list[str]]:
    """Return the cells of the table by the labels of the methods: seeds, size and accuracies."""
    rows = {}
    for records in (found.gated, found.plain):
        reached = measure_of(found.score, "accuracy")
        tested = [record.summary["accuracy"] for record in records]
        values = [(SIZE, [*map(size, records)]), (reached, [*map(valid_accuracy, records)]), (reached, tested)]
        cells = [(measure, mean_std(numbers)) for measure, numbers in values]
        texts = [f"{format_number(m, s.mean)} {format_std(m, s)}".strip() if s else MISSING for m, s in cells]
        rows[label(records[0])] = [str(len(records)), *texts]
    return rows


def _columns(score: str) -> list[str]:
    """Return the titles of the columns; accuracies are what is expected and need no name."""
    unit = "%" if score == "accuracy" else f"{score} %" if is_percent(score) else score
    return ["method", "n", "weights in use %", f"validation {unit}", f"test {unit}"]


def compression_table(found: Compression) -> Table:
    """Return the table for the terminal: size and accuracies of both methods, mean ± standard deviation over seeds."""
    made = Table(title=Text(found.title), title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in _columns(found.score):
        made.add_column(name, justify="left" if name == "method" else "right")
    for name, cells in _rows(found).items():
        made.add_row(Text(name), *cells)
    return made


def compression_csv(found: Compression) -> str:
    """Return every epoch of every run with all digits."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["method", "seed", "epoch", "size", found.score])
    for record in (*found.gated, *found.plain):
        for epoch, point in enumerate(points(record)):
            writer.writerow([record.spec.method, record.spec.seed, epoch + 1, point.size, point.accuracy])
    return out.getvalue()


def draw(found: Compression) -> Drawing:
    """Draw the score against the size, a dot per epoch, with plain SGD as a triangle at 100 %."""
    with style.context(["default", STYLE]):
        figure = draw_sizes({found.title: (found.gated, found.plain)}, found.score)
        title = f"{found.score[:1].upper()}{found.score[1:]} against the weights in use: {found.title}"
        return render("compression", "", "compress", figure, title)


def draw_sizes(tasks: Mapping[str, tuple[Sequence[Record], Sequence[Record]]], score: str = "accuracy") -> Figure:
    """Return the figure of one or several tasks.

    Args:
        tasks: by name the records of the method with gates and those of plain SGD, a record per seed.
        score: the name of the score of all tasks.
    """
    factor = 100 if is_percent(score) else 1
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.add_subplot()
    for k, (name, (gated, plain)) in enumerate(tasks.items()):
        colour, marker = PALETTE[k % len(PALETTE)], MARKERS[k // len(PALETTE) % len(MARKERS)]
        colour_of_plain = colour
        if len(tasks) == 1:  # colours mean methods; with several tasks they mean tasks
            (colour, _, marker), colour_of_plain = line_style(look(gated[0].spec.method)), look("sgd").colour
        for number, record in enumerate(gated):
            dots = points(record)
            x, y = [100 * max(dot.size, SMALLEST) for dot in dots], [factor * dot.accuracy for dot in dots]
            axes.plot(x, y, color=colour, marker=marker, linewidth=0.6, alpha=0.7, label=name if number == 0 else None)
        for record in plain:
            reached = factor * _plain_accuracy(record)
            axes.plot([100], [reached], color=colour_of_plain, marker="<", markersize=9, linestyle="")
    _quoted(axes)
    axes.set_xscale("log")
    lowest = min([dot.size for gated, _ in tasks.values() for record in gated for dot in points(record)], default=1.0)
    ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if tick >= min(1.0, 100 * max(lowest, SMALLEST))]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("weights in use, % (a dot per epoch; triangle: plain SGD)")
    shown = data_shown([record for gated, _ in tasks.values() for record in gated])
    axes.set_ylabel(f"{score} on {shown} data" + (", %" if is_percent(score) else ""))
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def _plain_accuracy(record: Record) -> float:
    """Return the validation accuracy of plain SGD, or that on test data if there is no validation data."""
    found = valid_accuracy(record)
    return found if found == found else record.summary["accuracy"]


def _quoted(axes: Axes) -> None:
    """Draw the sizes that HAT's paper quotes for other methods."""
    for line, (name, sizes) in zip((":", "--"), LINES.items(), strict=True):
        for number, share in enumerate(sizes):
            axes.axvline(100 * share, color=MUTED, linestyle=line, linewidth=1, label=name if number == 0 else None)


def _kept(found: Compression) -> str:
    """Return which epoch was kept."""
    if data_shown(found.gated) == "test":
        return "there are no validation data, so that the last epoch is kept, and the figure shows scores on test data"
    return "the epoch that is kept is the best on validation data"


def compression_page(found: Compression, drawing: Drawing) -> str:
    """Return a page with the table and the figure that loads no other file."""
    looks = variants({label(records[0]): records[0].spec.method for records in (found.gated, found.plain)})
    rows = [{"label": printable(name), "look": looks[name], "cells": cells} for name, cells in _rows(found).items()]
    title, heads = printable(found.title), [*map(printable, _columns(found.score))]
    return plain_page(
        "compress.html", title=title, heads=heads, rows=rows, svg=drawing.svg, quoted=" ".join(QUOTED), kept=_kept(found)
    )
