"""The response of a method to its options: a table, a CSV and a picture of a grid of runs."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.table import Table
from rich.text import Text

from hatrack.experiments.record import Record
from hatrack.reporting.drawing import LINES, MARKERS, PALETTE, STYLE, text_colour
from hatrack.reporting.measures import MISSING, Measure, format_number, format_std, mean_std, measure_of, spreadsheet_text
from hatrack.text import printable

VALID = "valid_accuracy"  # the key of the measure by which options are chosen


@dataclass(frozen=True)
class Response:
    """The records of a grid.

    Attributes:
        title: what was run.
        axes: the options that were varied, each with its values, as texts.
        records: the records of every combination of values, one per seed.
    """

    title: str
    axes: dict[str, list[str]]
    records: dict[tuple[str, ...], list[Record]]

    @property
    def measures(self) -> tuple[Measure, ...]:
        """The columns of the table: the accuracy, or another score, on validation and on test data, and the forgetting."""
        score = next((record.score for group in self.records.values() for record in group), "accuracy")
        tested, forgetting = measure_of(score, "accuracy"), measure_of(score, "forgetting")
        short = "validation %" if tested.unit == "%" else "validation"
        return Measure(VALID, f"{tested.title} on validation data", tested.unit, "", short=short), tested, forgetting

    @property
    def shown(self) -> tuple[Measure, ...]:
        """The measures in the picture: options are chosen by validation data."""
        return self.measures[0], self.measures[-1]

    def values(self, measure: Measure, point: tuple[str, ...]) -> list[float]:
        """Return a measure at a combination of values, a number per seed."""
        return [value(record, measure) for record in self.records.get(point, [])]


def value(record: Record, measure: Measure) -> float:
    """Return a measure of a record."""
    return record.valid_average if measure.key == VALID else record.summary[measure.key]


def response_table(response: Response) -> Table:
    """Return the table of the grid for the terminal, a line per combination."""
    title = Text(f"{response.title}: mean ± standard deviation over n seeds")
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in (*response.axes, "n", *(measure.short or measure.title for measure in response.measures)):
        table.add_column(Text(name), justify="right")
    for point in product(*response.axes.values()):
        cells = [(measure, mean_std(response.values(measure, point))) for measure in response.measures]
        texts = [f"{format_number(m, s.mean)} {format_std(m, s)}".strip() if s else MISSING for m, s in cells]
        table.add_row(*map(Text, point), str(len(response.records.get(point, []))), *texts)
    return table


def response_csv(response: Response) -> str:
    """Return the grid with all digits, a line per run."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*response.axes, "seed", *(measure.key for measure in response.measures)])
    for point, records in response.records.items():
        for record in records:
            values = [value(record, measure) for measure in response.measures]
            writer.writerow([*map(spreadsheet_text, point), record.spec.seed, *values])
    return out.getvalue()


def draw_response(response: Response) -> bytes:
    """Return the picture of the grid as PNG: two coloured tables if two options were varied, else lines with error bars."""
    with style.context(["default", STYLE]):
        out = io.BytesIO()
        draw_response_figure(response, (10, 4.2)).savefig(out, format="png", metadata={"Software": ""})
        return out.getvalue()


def draw_response_figure(response: Response, size: tuple[float, float]) -> Figure:
    """Draw the picture of a grid in the style that is in effect.

    Args:
        response: the records of the grid.
        size: width and height in inches.
    """
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(response.shown))
    for axes, measure in zip(panels, response.shown, strict=True):
        (_draw_table if len(response.axes) == 2 else _draw_lines)(axes, response, measure)
    figure.suptitle(printable(response.title), fontsize=12, x=0.02, ha="left")
    return figure


def _draw_lines(axes: Axes, response: Response, measure: Measure) -> None:
    """Draw a measure against the first option, with a line for every combination of the others."""
    (first, values), *others = response.axes.items()
    scale = 100 if measure.unit == "%" else 1
    for k, rest in enumerate(product(*(texts for _, texts in others))):
        found = [mean_std(response.values(measure, (value, *rest))) for value in values]
        means = [scale * s.mean if s else np.nan for s in found]
        errors = [scale * (s.std or 0) if s else 0 for s in found]
        name = ", ".join(f"{option} {text}" for (option, _), text in zip(others, rest, strict=True))
        axes.errorbar(
            range(len(values)), means, errors, label=name, capsize=3, color=PALETTE[k % len(PALETTE)],
            linestyle=LINES[k // len(PALETTE) % len(LINES)], marker=MARKERS[k % len(MARKERS)],
        )  # fmt: skip
    if others and measure == response.shown[-1]:
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.02, 1))
    _label(axes, measure, first, values)


def _draw_table(axes: Axes, response: Response, measure: Measure) -> None:
    """Draw a measure as a table of coloured cells, the first option from left to right."""
    (first, columns), (second, rows) = response.axes.items()
    found = [[mean_std(response.values(measure, (x, y))) for x in columns] for y in rows]
    means = np.array([[s.mean if s else np.nan for s in row] for row in found])
    image = axes.imshow(means, cmap="YlGnBu", aspect="auto")
    for (y, x), mean in np.ndenumerate(means):
        if np.isfinite(mean):
            background = "#{:02x}{:02x}{:02x}".format(*image.cmap(image.norm(mean), bytes=True)[:3])
            axes.text(x, y, format_number(measure, mean), ha="center", va="center", color=text_colour(background))
    axes.grid(False)
    _label(axes, measure, first, columns)
    axes.set_ylabel(second)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_title(_title(measure), loc="left", fontsize=11)


def _label(axes: Axes, measure: Measure, name: str, values: Sequence[str]) -> None:
    axes.set_xlabel(name)
    axes.set_xticks(range(len(values)), values)
    axes.set_ylabel(_title(measure))


def _title(measure: Measure) -> str:
    return f"{measure.title}, %" if measure.unit == "%" else measure.title
