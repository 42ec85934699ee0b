"""How figures look and how they are kept: colours, style, and one figure as SVG for the page and as PNG for slides."""

import io
import re
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from hatrack.methods import METHODS
from hatrack.reporting.tables import REFERENCES, Setting

INK, QUIET, GRID = "#1f2933", "#52606d", "#dde3e9"
PALETTE = ("#D55E00", "#009E73", "#0072B2", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito's, safe for colour-blind eyes
LINES = ("-", "--", "-.", ":")
MARKERS = "os^Dv"
LONGEST = 60  # letters of a name in the name of a file
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: it can be searched and read aloud
    "svg.hashsalt": "hatrack",  # the same figure gets the same ids
    "text.parse_math": False,  # a task may be called "$x$"
    "font.size": 11,
    "text.color": INK,
    "axes.edgecolor": "#9aa5b1",
    "axes.labelcolor": QUIET,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.labelcolor": QUIET,
    "ytick.labelcolor": QUIET,
    "lines.linewidth": 2,
    "lines.markersize": 4.5,
    "savefig.dpi": 160,
}


class Look(NamedTuple):
    """How a method is drawn in every figure."""

    colour: str
    line: str
    marker: str


@dataclass(frozen=True)
class Drawing:
    """One figure, finished."""

    kind: str  # accuracy, ratio, tasks, matrix or training
    label: str  # of the method; empty if it shows all of them
    name: str  # of the file, without its ending
    svg: str  # empty for a matrix: the page shows it as a table
    png: bytes


def looks(settings: list[Setting]) -> dict[str, Look]:
    """A look per method, the same all over the page."""
    order = list(METHODS)
    methods = {name: records[0].spec["method"] for s in settings for name, records in s.methods.items()}
    names = sorted(methods, key=lambda name: (order.index(methods[name]) if methods[name] in order else len(order), name))
    result = {name: Look(INK if methods[name] == "joint" else "#7b8794", ":", "") for name in names}
    for k, name in enumerate(name for name in names if methods[name] not in REFERENCES):
        line = LINES[k // len(PALETTE) % len(LINES)]
        result[name] = Look(PALETTE[k % len(PALETTE)], line, MARKERS[k % len(MARKERS)])
    return result


def task_colours(count: int) -> list[str]:
    """From the first task to the last, from dark to light; the palest yellows are left out."""
    return [to_hex(colour) for colour in colormaps["viridis"](np.linspace(0, 0.86, count))]


def shade(value: float, low: float, faded: bool = False) -> tuple[str, str]:
    """The colour of a cell that holds an accuracy, from pale at `low` to dark at 1, and a colour to write on it."""
    if not np.isfinite(value):
        return "#ffffff", QUIET
    place = np.clip((value - low) / max(1 - low, 1e-9), 0, 1)
    colour = np.array(colormaps["YlGnBu"](0.03 + 0.87 * place)[:3])
    if faded:
        return to_hex(tuple(1 - 0.16 * (1 - colour))), QUIET
    back = to_hex(tuple(colour))
    return back, ink_on(back)


def ink_on(back: str) -> str:
    """Black or white, whichever has the higher contrast (WCAG)."""
    colour = np.array(to_rgb(back))
    linear = np.where(colour <= 0.04045, colour / 12.92, ((colour + 0.055) / 1.055) ** 2.4)
    return "#000000" if linear @ [0.2126, 0.7152, 0.0722] > 0.179 else "#ffffff"


def slugs(names: list[str]) -> list[str]:
    """A file name for each name: plain letters and digits, no two the same."""
    result: list[str] = []
    for name in names:
        slug = re.sub(r"[^a-z0-9.]+", "-", name.lower())[:LONGEST].strip("-.") or "unnamed"
        unique, number = slug, 1
        while unique in result:
            number += 1
            unique = f"{slug}-{number}"
        result.append(unique)
    return result


def finish(kind: str, label: str, name: str, figure: Figure, description: str) -> Drawing:
    """Save a figure in both forms, without dates, so that the same records give the same bytes."""
    png, svg = io.BytesIO(), io.StringIO()
    figure.savefig(png, format="png", metadata={"Software": None})
    if kind != "matrix":
        figure.savefig(svg, format="svg", metadata={"Date": None})
    return Drawing(kind, label, name, inline(svg.getvalue(), name, description), png.getvalue())


def inline(svg: str, name: str, description: str) -> str:
    """An SVG file as part of a page: as wide as its place, with ids of its own, and it says what it shows."""
    for part in (r"<!--.*?-->", r"<metadata>.*?</metadata>", r"<style.*?</style>", r"^.*?(?=<svg )"):
        svg = re.sub(part, "", svg, flags=re.DOTALL)
    svg = re.sub(r"<[^>]+>", lambda tag: _own(tag[0], name), svg)  # tags alone: a name may look like an attribute
    box = re.search(r'viewBox="[^"]*"', svg)
    head = f'<svg role="img" aria-label="{escape(description)}" {box[0] if box else ""}>'
    return re.sub(r"^<svg [^>]*>", lambda _: head, svg).replace("xlink:href", "href").strip()


def _own(tag: str, name: str) -> str:
    """A tag whose ids, and references to them, start with `name`, and whose font is the page's."""
    return re.sub(r' id="| xlink:href="#|url\(#', rf"\g<0>{name}-", re.sub(r'font-family: [^;"]*;? ?', "", tag))
