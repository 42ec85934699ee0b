"""A wrong keyword of a method's class: the error names the nearest right one."""

import inspect
from collections.abc import Iterable
from typing import Any, Self

from hatrack.options import nearest


class CheckedKeywords:
    """A class whose wrong keywords end in an error that names the right ones, before an object is made.

    `Method` inherits this `__new__` and has an `__init__` of its own, so that `inspect.signature` and type checkers read the
    `__init__`.
    """

    def __new__(cls, *given: Any, **keywords: Any) -> Self:
        if keywords:  # there are none when a copy is made or a pickle is read
            check_keywords(cls, keywords)
        return super().__new__(cls)


def check_keywords(made: type, keywords: Iterable[str]) -> None:
    """Raise a TypeError in one line, as Python does, if a class takes no keyword of one of these names."""
    taken = inspect.signature(made).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken):
        return
    names = [p.name for p in taken if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for name in keywords:
        if name not in names:
            raise TypeError(f"{made.__name__} has no option {name!r}; {nearest(name, names)}")
