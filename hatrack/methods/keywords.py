"""A wrong keyword of a method's class: the error names the nearest right one."""

import inspect
from collections.abc import Iterable

from hatrack.options import nearest


def check_keywords(made: type, keywords: Iterable[str]) -> None:
    """Raise a TypeError in one line, as Python does, if a class takes no keyword of one of these names."""
    taken = inspect.signature(made).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken):
        return
    names = [p.name for p in taken if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for name in keywords:
        if name not in names:
            raise TypeError(f"{made.__name__} has no option {name!r}; {nearest(name, names)}")
