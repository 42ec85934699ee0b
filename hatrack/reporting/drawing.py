"""Colours and style of the figures, and their rendering: as SVG for the page and as PNG for slides."""

import io
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from hatrack.experiments.metrics import Matrix
from hatrack.reporting.looks import DASHES, HUES, REFERENCE_LOOKS, Look, contrast, variants
from hatrack.reporting.looks import MARKERS as MARKER_NAMES
from hatrack.reporting.svg import page_svg
from hatrack.reporting.tables import Setting
from hatrack.text import is_percent

TEXT, MUTED, GRID = "#1f2933", "#52606d", "#dde3e9"
PALETTE = tuple(colour for colour, _ in (*HUES.values(), *REFERENCE_LOOKS.values()))  # of lines that are no methods
LINES = ("-", "--", "-.", ":")
MARKERS = "os^Dv"
MAX_LETTERS = 60  # of a name in a file name
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text, so that it can be searched and read aloud
    "svg.hashsalt": "hatrack",  # the same figure has the same ids
    "text.parse_math": False,  # a task may be called "$x$"
    "font.size": 11,
    "text.color": TEXT,
    "axes.edgecolor": "#9aa5b1",
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "legend.handlelength": 3,  # so long that dashes can be told apart
    "lines.linewidth": 2,
    "lines.markersize": 4.5,
    "savefig.dpi": 160,
}


class LineStyle(NamedTuple):
    """How the lines of a method are drawn, in every figure."""

    colour: str
    line: str
    marker: str


@dataclass(frozen=True)
class Drawing:
    """A rendered figure."""

    kind: str  # of a recipe's plot, or "compression"
    label: str  # of the method; empty if the figure shows all methods
    name: str  # of the file, without its ending
    svg: str
    png: bytes


class Scale(NamedTuple):
    """From where to where accuracies are drawn, or other scores.

    Attributes:
        low: the lower end, a fraction of 1.
        high: the upper end.
        percent: whether they are written in percent.
    """

    low: float
    high: float = 1.0
    percent: bool = True

    @property
    def factor(self) -> float:
        """What values are multiplied with before they are drawn."""
        return 100 if self.percent else 1

    def text(self, value: float) -> str:
        """Return a value as it is written."""
        return f"{100 * value:.1f}" if self.percent else f"{value:.3f}"


def scale_for(score: str, values: Matrix) -> Scale:
    """Return the scale on which values of a score are drawn: accuracies up to 100 %, others as far as they go."""
    if is_percent(score):
        return Scale(round_down(values))
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    return Scale(low, high if high > low else low + 1, percent=False)


def round_down(values: Matrix) -> float:
    """Return the lowest of the values, rounded down to tenths, at most 0.9."""
    return float(np.clip(np.floor(10 * np.nanmin(values)) / 10, 0, 0.9)) if np.isfinite(values).any() else 0.0


def looks_of(settings: list[Setting]) -> dict[str, Look]:
    """Return how every method is drawn by its label, the same in all figures; see `looks.py`.

    Of several variants of a method, the one without options has the method's own colour and marker.
    """
    methods = {name: records[0].spec.method for s in settings for name, records in s.methods.items()}
    order = sorted(methods, key=lambda name: (methods[name], name != methods[name], name))
    return variants({name: methods[name] for name in order})


def line_style(one: Look) -> LineStyle:
    """Return the style of a line in a figure of matplotlib."""
    return LineStyle(one.colour, DASHES[one.dash], MARKER_NAMES.get(one.marker, ""))


def line_styles(settings: list[Setting]) -> dict[str, LineStyle]:
    """Return the styles of lines in figures of matplotlib, by the labels of the methods."""
    return {name: line_style(one) for name, one in looks_of(settings).items()}


def task_colours(count: int) -> list[str]:
    """Return a colour per task, from dark to light, without the palest yellows."""
    return [to_hex(colour) for colour in colormaps["viridis"](np.linspace(0, 0.86, count))]


def cell_colours(value: float, low: float, faded: bool = False, high: float = 1.0) -> tuple[str, str]:
    """Return the background of a cell that shows an accuracy, from pale at `low` to dark at `high`, and its text colour."""
    if not np.isfinite(value):
        return "#ffffff", MUTED
    position = np.clip((value - low) / max(high - low, 1e-9), 0, 1)
    colour = np.array(colormaps["YlGnBu"](0.03 + 0.87 * position)[:3])
    if faded:
        return to_hex(tuple(1 - 0.16 * (1 - colour))), MUTED
    background = to_hex(tuple(colour))
    return background, text_colour(background)


def text_colour(background: str) -> str:
    """Return black or white, whichever has the higher contrast with the background (WCAG)."""
    return max("#000000", "#ffffff", key=lambda colour: contrast(colour, background))


def slugs(names: list[str]) -> list[str]:
    """Return a file name for every name, from letters and digits; all are different."""
    result: list[str] = []
    for name in names:
        slug = re.sub(r"[^a-z0-9.]+", "-", name.lower())[:MAX_LETTERS].strip("-.") or "unnamed"
        unique, number = slug, 1
        while unique in result:
            number += 1
            unique = f"{slug}-{number}"
        result.append(unique)
    return result


def render(kind: str, label: str, name: str, figure: Figure, description: str) -> Drawing:
    """Render a figure in both formats, without dates, so that the same records give the same bytes."""
    png = io.BytesIO()
    figure.savefig(png, format="png", metadata={"Software": None})
    return Drawing(kind, label, name, page_svg(figure, name, description), png.getvalue())
