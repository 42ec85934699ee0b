"""How every method looks, on every page and in every figure: one fixed colour and marker per method.

Two methods never share both. Colours are told apart with the common kinds of colour blindness, and each stands out from
white paper (`colour`) and from a dark screen (`dark`); the tests compute both.
"""

import zlib
from collections.abc import Mapping
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
METHOD_LOOKS = {  # hue and marker; related methods share a hue, but not HAT and those that are most often beside it
    "hat": ("green", "circle"),
    "pmask": ("pink", "diamond"),
    "packnet": ("ochre", "inverted_triangle"),
    "lora": ("indigo", "diamond"),
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
        variant: 0 for the method itself; further variants with other options have shades of its colour,
            other dashes, and markers that no method of this colour has.
    """
    if method in REFERENCE_LOOKS:
        return Look(*REFERENCE_LOOKS[method], "", "dotted")
    hue, marker = METHOD_LOOKS.get(method) or _own(method)
    colour, dark = HUES[hue]
    shade, dash = SHADES[variant % len(SHADES)], list(DASHES)[variant % len(DASHES)]
    taken = {own for of, own in METHOD_LOOKS.values() if of == hue}
    markers = [marker, *(free for free in MARKERS if free not in taken and free != marker)]
    marker = markers[variant % len(markers)]
    return Look(mixed(colour, "#ffffff", shade * 0.6), mixed(dark, "#14181d", shade * 0.6), marker, dash)


def _own(method: str) -> tuple[str, str]:
    """Return hue and marker of a user's own method: they follow from its name."""
    number = zlib.crc32(method.encode("utf-8", "replace"))
    return list(HUES)[number % len(HUES)], OWN_MARKERS[number // len(HUES) % len(OWN_MARKERS)]


def variants(methods: Mapping[str, str]) -> dict[str, Look]:
    """Return how the methods of a page or figure are drawn, by their labels.

    Args:
        methods: the name of the method by label; of several with one name, the first has the method's own colour and marker.
    """
    counts: dict[str, int] = {}
    result = {}
    for label, method in methods.items():
        counts[method] = counts.get(method, -1) + 1
        result[label] = look(method, counts[method])
    return result


def told_apart(methods: Mapping[str, str]) -> dict[str, Look]:
    """Return how methods are drawn, as `variants` does; but three or more that all share a hue, which then says nothing,
    have one each."""
    found = variants(methods)
    own = [label for label, method in methods.items() if method not in REFERENCE_LOOKS]
    hues = {(METHOD_LOOKS.get(methods[label]) or _own(methods[label]))[0] for label in own}
    if len(own) < 3 or len(hues) > 1:
        return found
    order = sorted(HUES, key=lambda hue: hue not in hues)  # the first keeps its colour
    colours = [*(HUES[hue] for hue in order), *REFERENCE_LOOKS.values()]
    for k, label in enumerate(own):
        colour, dark = colours[k % len(colours)]
        found[label] = found[label]._replace(colour=colour, dark=dark)
    return found


def contrast(one: str, two: str) -> float:
    """Return how far two colours stand out from each other, from 1 to 21 (WCAG)."""
    dark, bright = sorted(map(_brightness, (one, two)))
    return (bright + 0.05) / (dark + 0.05)


def _brightness(colour: str) -> float:
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def mixed(colour: str, ground: str, share: float) -> str:
    """Return a colour that is moved towards the ground, or away from it if the share is negative."""
    parts = [(int(colour[k : k + 2], 16), int(ground[k : k + 2], 16)) for k in (1, 3, 5)]
    if share < 0:  # away from white is towards black, and the other way round
        parts = [(a, 255 - b if b in (0, 255) else 255) for a, b in parts]
    return "#" + "".join(f"{round(a + abs(share) * (b - a)):02x}" for a, b in parts)
