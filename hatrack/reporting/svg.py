"""Figures of matplotlib as elements of a page: without a ground of their own, in colours that follow the page's theme."""

import io
import re
from functools import cache
from html import escape

from matplotlib.figure import Figure

from hatrack.reporting.looks import HUES, METHOD_LOOKS, REFERENCE_LOOKS, SHADES, contrast, look, mixed

DARK_GROUND = "#11161b"  # of pages, as in page.css
SCALE = 1.25  # pixels per point of a figure, if the page has room
WIDE = 2.4  # how much wider than high a figure is that can't shrink to the width of a phone
NEUTRALS = {  # text, quiet text, lines of the grid and of the axes: on white, on dark
    "#1f2933": "#e8ecf1",
    "#000000": "#e8ecf1",
    "#52606d": "#a6b1bd",
    "#dde3e9": "#2f3944",
    "#9aa5b1": "#5b6875",
}


def page_svg(figure: Figure, name: str, description: str) -> str:
    """Return a figure as an SVG element of a page, without dates, so that the same records give the same bytes."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None}, transparent=True)
    return inline_svg(out.getvalue(), name, description)


def inline_svg(svg: str, name: str, description: str) -> str:
    """Return an SVG file as an element of a page: with a width that may shrink, unique ids and a description."""
    for part in (r"<!--.*?-->", r"<metadata>.*?</metadata>", r"<style.*?</style>", r"^.*?(?=<svg )"):
        svg = re.sub(part, "", svg, flags=re.DOTALL)
    svg = re.sub(r"<[^>]+>", lambda tag: _fit(tag[0], name), svg)  # only in tags: a name may look like an attribute
    box = re.search(r'viewBox="[^"]*"', svg)
    head = f'<svg role="img" aria-label="{escape(description)}" {_size(box[0]) if box else ""}>'
    return re.sub(r"^<svg [^>]*>", lambda _: head, svg).replace("xlink:href", "href").strip()


def _size(box: str) -> str:
    """Return the attributes of a size at which letters are as large as the page's; wide figures have a class."""
    width, height = map(float, box.strip('"').split()[-2:])
    return f'{box} width="{round(SCALE * width)}"' + (' class="wide"' if width > WIDE * height else "")


def _fit(tag: str, name: str) -> str:
    """Put `name` before the ids of a tag and before its references to ids, remove its font, which is the page's, and let its
    colours follow the theme; browsers that do not know `light-dark` take the first of two."""
    tag = re.sub(r' id="| xlink:href="#|url\(#', rf"\g<0>{name}-", re.sub(r'font-family: [^;"]*;? ?', "", tag))
    return re.sub(r"\b(fill|stroke): (#[0-9a-f]{6})\b", lambda m: f"{m[0]}; {m[1]}: {_both(m[2])}", tag)


def _both(colour: str) -> str:
    return f"light-dark({colour}, {on_dark(colour)})"


@cache
def on_dark(colour: str) -> str:
    """Return the colour that stands for another one on a dark ground: that of the same method, or a lighter one."""
    if colour in _dark_colours():
        return _dark_colours()[colour]
    shares = (k / 20 for k in range(20))
    return next(lighter for share in shares if contrast(lighter := mixed(colour, "#ffffff", share), DARK_GROUND) >= 3)


@cache
def _dark_colours() -> dict[str, str]:
    one_of_each = {hue: name for name, (hue, _) in METHOD_LOOKS.items()}
    assert set(one_of_each) == set(HUES)
    looks = [look(name, k) for name in one_of_each.values() for k in range(len(SHADES))]
    return {one.colour: one.dark for one in (*looks, *map(look, REFERENCE_LOOKS))} | NEUTRALS
