"""How every method looks, on every page and in every figure: one fixed colour and marker per method.

Two methods never share both. Colours are told apart with the common kinds of colour blindness, and each stands out from
white paper (`colour`) and from a dark screen (`dark`); the tests compute both.
"""

import zlib
from typing import NamedTuple

HUES = {  # on white, on dark
    "blue": ("#0c8fc8", "#569ad9"),
    "vermilion": ("#e3720f", "#ff8a59"),
    "green": ("#05795c", "#38c791"),
    "pink": ("#c94692", "#f29bcb"),
    "ochre": ("#94571b", "#e3c53c"),
    "indigo": ("#4e3db1", "#abaeff"),
}
REFERENCE_LOOKS = {"joint": ("#1f2933", "#e6eaf0"), "random": ("#66717e", "#9aa5b1")}
METHOD_LOOKS = {  # hue and marker; related methods share a hue where that is possible
    "hat": ("green", "circle"),
    "pmask": ("green", "square"),
    "packnet": ("green", "triangle"),
    "lora": ("green", "diamond"),
    "sgd": ("vermilion", "circle"),
    "stable-sgd": ("vermilion", "square"),
    "frozen": ("ochre", "triangle"),
    "lfl": ("vermilion", "triangle"),
    "ewc": ("blue", "circle"),
    "si": ("blue", "square"),
    "mas": ("blue", "triangle"),
    "imm-mean": ("blue", "diamond"),
    "imm-mode": ("blue", "inverted_triangle"),
    "er": ("pink", "circle"),
    "derpp": ("pink", "square"),
    "agem": ("pink", "triangle"),
    "lwf": ("ochre", "circle"),
    "independent": ("ochre", "square"),
    "pnn": ("indigo", "circle"),
    "den": ("indigo", "square"),
    "pathnet": ("indigo", "triangle"),
}
OWN_MARKERS = ("hex", "star")  # of methods that the table does not have: a user's own
MARKERS = {  # names of the charts of the page, and of matplotlib
    "circle": "o",
    "square": "s",
    "triangle": "^",
    "diamond": "D",
    "inverted_triangle": "v",
    "hex": "h",
    "star": "*",
}
DASHES = {"solid": "-", "dashed": "--", "dotdash": "-.", "dotted": ":"}
SHADES = (0.0, 0.35, -0.3, 0.55, -0.5)  # of variants of a method: how far to the background, or away from it


class Look(NamedTuple):
    """How a method is drawn.

    Attributes:
        colour: on a white ground.
        dark: on a dark ground.
        marker: a key of `MARKERS`; empty for references.
        dash: a key of `DASHES`.
    """

    colour: str
    dark: str
    marker: str
    dash: str = "solid"


def look(method: str, variant: int = 0) -> Look:
    """Return how a method is drawn.

    Args:
        method: its name.
        variant: 0 for the method itself; further variants with other options have shades of its colour and other dashes.
    """
    if method in REFERENCE_LOOKS:
        return Look(*REFERENCE_LOOKS[method], "", "dotted")
    hue, marker = METHOD_LOOKS.get(method) or _own(method)
    colour, dark = HUES[hue]
    shade, dash = SHADES[variant % len(SHADES)], list(DASHES)[variant % len(DASHES)]
    markers = list(MARKERS)
    marker = markers[(markers.index(marker) + variant) % len(markers)]
    return Look(_mixed(colour, "#ffffff", shade * 0.6), _mixed(dark, "#14181d", shade * 0.6), marker, dash)


def _own(method: str) -> tuple[str, str]:
    """Return hue and marker of a user's own method: they follow from its name."""
    number = zlib.crc32(method.encode("utf-8", "replace"))
    return list(HUES)[number % len(HUES)], OWN_MARKERS[number // len(HUES) % len(OWN_MARKERS)]


def _mixed(colour: str, ground: str, share: float) -> str:
    """Return a colour that is moved towards the ground, or away from it if the share is negative."""
    parts = [(int(colour[k : k + 2], 16), int(ground[k : k + 2], 16)) for k in (1, 3, 5)]
    if share < 0:  # away from white is towards black, and the other way round
        parts = [(a, 255 - b if b in (0, 255) else 255) for a, b in parts]
    return "#" + "".join(f"{round(a + abs(share) * (b - a)):02x}" for a, b in parts)
