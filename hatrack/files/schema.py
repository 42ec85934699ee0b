"""What a file may hold, put together as the file is: a check takes the place where a value stands, and the value.

An error names the place and what was expected there: "curves[2].best must be a whole number from 0, not 'x'".
"""

import math
import reprlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[str, Any], None]
LARGEST = sys.float_info.max


def wrong(where: str, wanted: str, value: Any) -> ValueError:
    return ValueError(f"{where} must be {wanted}, not {reprlib.repr(value)}")


def number(
    low: float = -math.inf, high: float = math.inf, *, whole: bool = False, null: bool = False, finite: bool = True
) -> Check:
    """A number within bounds; true and false are none. Neither is one that no float can hold."""
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
    if not isinstance(value, str):
        raise wrong(where, "a text", value)


def line(where: str, value: Any) -> None:
    """A text that can be shown in a line: without control characters."""
    if not isinstance(value, str) or not value.isprintable() or len(value) > 1000:
        raise wrong(where, "a line of text", value)


def flag(where: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise wrong(where, "true or false", value)


def plain(where: str, value: Any) -> None:
    """An option's value: a text, a number, true, false or null, or a list of those."""
    for one in value if isinstance(value, list) else [value]:
        if not isinstance(one, str | int | float | None):
            raise wrong(where, "a text, a number or a list of them", value)


def items(each: Check, count: int | None = None, *, least: int = 0, what: str = "") -> Check:
    """A list, of so many if that is given; `what` says of what."""
    size = f" of {count}" if count is not None else f" of at least {least}" if least else ""
    wanted = f"a list{size}{f' {what}' if what else ''}"

    def check(where: str, value: Any) -> None:
        if not isinstance(value, list) or len(value) < least or (count is not None and len(value) != count):
            raise wrong(where, wanted, value)
        for place, one in enumerate(value):
            each(f"{where}[{place}]", one)

    return check


def matrix(each: Check, count: int) -> Check:
    """Of so many rows and columns."""
    row = items(each)

    def check(where: str, value: Any) -> None:
        rows = value if isinstance(value, list) else []
        if [len(one) if isinstance(one, list) else -1 for one in rows] != [count] * count:
            raise wrong(where, f"a {count} x {count} matrix of numbers", value)
        for place, one in enumerate(rows):
            row(f"{where}[{place}]", one)

    return check


def table(each: Check) -> Check:
    """Any names, and a value of one kind for each."""

    def check(where: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise wrong(where, "a table of names and values", value)
        for name, one in value.items():
            each(f"{where}.{reprlib.repr(name)[1:-1]}", one)

    return check


def fields(known: Mapping[str, Check], optional: Mapping[str, Check] | None = None, *, closed: bool = False) -> Check:
    """These names, some of which may be missing; others are passed over, for the sake of later versions, unless `closed`."""
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
