"""Text for terminals, reports and warnings."""

import sys
from typing import TextIO


def printable(text: object) -> str:
    """Return a text on one line and without control characters, so that any name can be written anywhere."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())


def visible(text: object) -> str:
    """Return a text with a question mark in place of every character that is not printable: a newline, an escape, a byte of
    a file name that is not UTF-8. Unlike `printable` it keeps spaces as they are."""
    return "".join(c if c.isprintable() else "?" for c in str(text))


def say(text: object, file: TextIO | None = None) -> None:
    """Print one line, without control characters, whatever names it contains.

    Args:
        text: the line.
        file: where to; by default standard output.
    """
    print(visible(text), file=file or sys.stdout, flush=True)


def shorten(text: str, most: int = 1000) -> str:
    """Return the text, cut off with an ellipsis if it has more than `most` characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def one_line(message: Warning | str, category: object, filename: object, lineno: object, line: object = None) -> str:
    """Return the line that shows a warning; this replaces `warnings.formatwarning`."""
    return f"hatrack: {printable(message)}\n"


def duration(seconds: float) -> str:
    """Return a time as a person says it: 4.5 s, 12 min, 3.2 h."""
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


SCORES = ("accuracy", "label accuracy", "R²", "score")  # what targets are measured by; a file could name anything


def is_percent(score: str | None) -> bool:
    """Return whether a score with this name is a share of right answers; None is the accuracy."""
    return score is None or score.endswith("accuracy")


def score_text(score: str | None, value: float) -> str:
    """Return a score with its name: accuracy 98.2%, R² 0.913, score -4.2. None is the accuracy."""
    return f"{score or 'accuracy'} {value:.1%}" if is_percent(score) else f"{score} {value:.3g}"


def score_value(score: str | None, value: float) -> str:
    """Return a score without its name: 98.21% if it is a share of right answers, otherwise a number."""
    return f"{value:.2%}" if is_percent(score) else f"{value:.4g}"


SCARCE = 0.05  # if a smaller share of a layer is free, a warning names the layer
HELD = " (held whole: "  # in the names of `usage`: a parameter that no task after the first can change, and the reason


def held_whole(name: str, reason: str) -> str:
    """Return the name in `usage` of a parameter that is held whole."""
    return f"{name}{HELD}{reason})"


def is_held(name: str) -> bool:
    """Return whether a name in `usage` is that of a parameter that is held whole."""
    return HELD in name
