"""Checks of what a file contains, composed as the file is structured.

A check is a function of a place in the file and the value there; it raises a ValueError that names the place and what was
expected: "curves[2].best must be a whole number from 0, not 'x'". Example:

    check = fields({"name": line, "sizes": items(number(0, whole=True))})
    check("", {"name": "a", "sizes": [1, 2]})     # passes
    check("", {"name": "a", "sizes": [1, -2]})    # ValueError: sizes[1] must be a whole number from 0, not -2
"""

import math
import reprlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[str, Any], None]
LARGEST = sys.float_info.max


def wrong(where: str, wanted: str, value: Any) -> ValueError:
    """Return the error for a value at a place where something else was expected."""
    return ValueError(f"{where} must be {wanted}, not {reprlib.repr(value)}")


def number(
    low: float = -math.inf, high: float = math.inf, *, whole: bool = False, null: bool = False, finite: bool = True
) -> Check:
    """Return a check for a number.

    Args:
        low: the smallest number that is accepted.
        high: the largest number that is accepted.
        whole: accept integers only.
        null: accept null (None) as well.
        finite: if False, accept nan and infinities as well.

    Returns:
        The check. It refuses true and false, and integers that are too large for a float.
    """
    wanted = "a whole number" if whole else "a number"
    wanted += f" from {low:g}" if math.isfinite(low) else ""
    wanted += f" to {high:g}" if math.isfinite(high) else ""
    wanted += " or null" if null else ""
    kinds = (int,) if whole else (int, float)

    def check(where: str, value: Any) -> None:
        right = type(value) in kinds and -LARGEST <= value <= LARGEST and low <= value <= high
        special = (null and value is None) or (not finite and isinstance(value, float) and not math.isfinite(value))
        if not right and not special:
            raise wrong(where, wanted, value)

    return check


def text(where: str, value: Any) -> None:
    """Check for a text."""
    if not isinstance(value, str):
        raise wrong(where, "a text", value)


def line(where: str, value: Any) -> None:
    """Check for a text that can be shown in one line: at most 1000 characters, none of them a control character."""
    if not isinstance(value, str) or not value.isprintable() or len(value) > 1000:
        raise wrong(where, "a line of text", value)


def flag(where: str, value: Any) -> None:
    """Check for true or false."""
    if not isinstance(value, bool):
        raise wrong(where, "true or false", value)


def plain(where: str, value: Any) -> None:
    """Check for the value of an option: a text, a number, true, false or null, or a list of those."""
    for one in value if isinstance(value, list) else [value]:
        if not isinstance(one, str | int | float | None):
            raise wrong(where, "a text, a number or a list of them", value)


def items(each: Check, count: int | None = None, *, least: int = 0, what: str = "") -> Check:
    """Return a check for a list.

    Args:
        each: the check of every item.
        count: the number of items; None: any number.
        least: the smallest number of items.
        what: what the items are, for error messages.
    """
    size = f" of {count}" if count is not None else f" of at least {least}" if least else ""
    wanted = f"a list{size}{f' {what}' if what else ''}"

    def check(where: str, value: Any) -> None:
        if not isinstance(value, list) or len(value) < least or (count is not None and len(value) != count):
            raise wrong(where, wanted, value)
        for place, one in enumerate(value):
            each(f"{where}[{place}]", one)

    return check


def matrix(each: Check, count: int) -> Check:
    """Return a check for a list of `count` lists of `count` values, each checked by `each`."""
    row = items(each)

    def check(where: str, value: Any) -> None:
        rows = value if isinstance(value, list) else []
        if [len(one) if isinstance(one, list) else -1 for one in rows] != [count] * count:
            raise wrong(where, f"a {count} x {count} matrix of numbers", value)
        for place, one in enumerate(rows):
            row(f"{where}[{place}]", one)

    return check


def table(each: Check) -> Check:
    """Return a check for a mapping with any names, whose values are checked by `each`."""

    def check(where: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise wrong(where, "a table of names and values", value)
        for name, one in value.items():
            each(f"{where}.{reprlib.repr(name)[1:-1]}", one)

    return check


def fields(known: Mapping[str, Check], optional: Mapping[str, Check] | None = None, *, closed: bool = False) -> Check:
    """Return a check for a mapping with certain names.

    Args:
        known: the checks of the values that must be there, by name.
        optional: the checks of the values that may be missing.
        closed: refuse other names; otherwise they are ignored, because later versions may add some.
    """
    every = {**known, **(optional or {})}

    def check(where: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise wrong(where or "the whole", "a table of names and values", value)
        inside = f"{where}." if where else ""
        if closed and (others := value.keys() - every.keys()):
            raise wrong(where, f"a table of {', '.join(every)}", sorted(others))
        for name, one in every.items():
            if name in value:
                one(f"{inside}{name}", value[name])
            elif name in known:
                raise ValueError(f"{inside}{name} is missing")

    return check
