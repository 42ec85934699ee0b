"""Elements that several parts of the page share: texts, tables, cells and the labels of methods, as HTML."""

from collections.abc import Iterable
from html import escape

from hatrack.reporting.drawing import LineStyle
from hatrack.reporting.measures import MISSING, MeanStd, Measure, format_number, format_std
from hatrack.reporting.words import count_text
from hatrack.text import printable


def escaped(text: object) -> str:
    """Return a name from a record as text that HTML cannot take for a tag."""
    return escape(printable(text))


def table(head: Iterable[str], bodies: Iterable[str], kind: str, caption: str = "") -> str:
    """Return a table in a box that scrolls if the table is wider than the screen; `head` holds complete cells."""
    title = f"<caption>{caption}</caption>" if caption else ""
    return (
        f'<div class="scroll"><table class="{kind}">{title}\n<thead><tr>{"".join(head)}</tr></thead>\n'
        + "\n".join(bodies)
        + "\n</table></div>"
    )


def coloured_label(label: str, styles: dict[str, LineStyle]) -> str:
    """Return a method's label behind a dot in the method's colour."""
    first, _, rest = label.partition(" ")
    dot = f'<span class="swatch" style="background:{styles[label].colour}"></span>'
    return f'<span class="nowrap">{dot}{escaped(first)}</span> {escaped(rest)}'


def cell(measure: Measure, value: MeanStd | None, seeds: int) -> str:
    """Return the content of a cell: mean and standard deviation, and over how many seeds if these are not all `seeds`."""
    if value is None:
        return MISSING
    parts = [format_std(measure, value), f"of {count_text(value.seeds, 'seed')}" if value.seeds < seeds else ""]
    return format_number(measure, value.mean) + "".join(f" <small>{part}</small>" for part in parts if part)


def unbroken(name: str, short: int = 0) -> str:
    """Return a name that is wrapped only between words, and not at all if it has at most `short` letters."""
    parts = [name] if len(name) <= short else name.split()
    return " ".join(f'<span class="nowrap">{escaped(p)}</span>' if len(p) <= max(short, 12) else escaped(p) for p in parts)
