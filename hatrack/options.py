"""Options: a parameter's annotation has its help text and range, which the library and the command line both read.

class HAT(Method):
    def __init__(self, net: Network, *, smax: Annotated[float, Option("hardness of the gates", low=1)] = 400.0): ...
"""

import difflib
import inspect
import math
import operator
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from hatrack.text import printable, shorten

T = TypeVar("T")
LARGEST = 3.4e38  # of options that state no range: the numbers of a network are float32, which ends there
LARGEST_WHOLE = 2**31 - 1


@dataclass(frozen=True)
class Option:
    """The help text of a parameter, and the values that are allowed. It stands in the parameter's annotation.

    Args:
        help: the help text.
        low: the smallest value allowed.
        above: values must be greater than this.
        high: the largest value allowed.
        added: the option is younger than the first records; at its default it is left out of a spec, so that older records
            keep their names.
        retired: another option has taken its place. The command line does not offer it any more; specs of older records,
            and calls in Python, may still give it.

    Example:
        >>> from typing import Annotated
        >>> class Mine(hr.Method):
        ...     def __init__(self, net, *, strength: Annotated[float, hr.Option("how strong it is", low=0)] = 1.0):
        ...         super().__init__(net)
        ...         self.options = hr.check(Mine, locals())
        >>> Mine(hr.Network(trunk, tasks=tasks), strength=-1.0)
        Traceback (most recent call last):
        ValueError: strength must be at least 0, not -1.0
    """

    help: str
    low: float | None = None
    above: float | None = None
    high: float | None = None
    added: bool = False
    retired: bool = False


class Parameter(NamedTuple):
    """One option of a function or class, read from its signature."""

    name: str
    type: Any
    default: Any
    option: Option

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values of a parameter that takes one of a few; empty for others."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()


def parameters(function: Callable[..., Any]) -> dict[str, Parameter]:
    """Return the options of a function or class: its parameters that are annotated with an `Option`."""
    return dict(_read_signature(function))


@cache  # every run, record and command asks for the same few signatures many times
def _read_signature(function: Callable[..., Any]) -> dict[str, Parameter]:
    typed: Any = inspect.getattr_static(function, "__init__") if isinstance(function, type) else function
    hints = get_type_hints(typed, include_extras=True)
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints.get(name)
        if get_origin(hint) is Annotated:
            kind, *extra = get_args(hint)
            option = next((e for e in extra if isinstance(e, Option)), None)
            if option is not None:
                found[name] = Parameter(name, kind, parameter.default, option)
    return found


def offered(function: Callable[..., Any]) -> dict[str, Parameter]:
    """Return the options of a function or class that the command line offers: all but those that are retired."""
    return {name: parameter for name, parameter in parameters(function).items() if not parameter.option.retired}


def expect(name: str, value: Any, kind: Any, wanted: str) -> None:
    """Raise a ValueError unless a value is of a kind.

    Args:
        name: what the value is, for the message.
        value: the value.
        kind: a class, or several joined by |.
        wanted: what was expected, in words.
    """
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be {wanted}, not {shown(value)}")


def whole(name: str, value: Any) -> int:
    """Return a whole number of Python, numpy or torch as an int; raise a ValueError that names it for anything else."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, not {shown(value)}") from None


def nearest(name: Any, names: Iterable[str]) -> str:
    """Return the end of an error message: the closest of the valid names, then all of them."""
    names = {known.casefold(): known for known in sorted(names)}
    close = difflib.get_close_matches(str(name).casefold(), names, n=1)
    hint = f"did you mean {names[close[0]]!r}? There are: " if close else "there are: "
    return hint + f"{', '.join(names.values()) or 'none'}"


def choose(kind: str, name: str, table: Mapping[str, T]) -> T:
    """Return the entry of a table by name, or raise an error that names the nearest one."""
    if not isinstance(name, str) or name not in table:
        raise ValueError(f"no {kind} {shown(name)}; {nearest(name, table)}")
    return table[name]


def check(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Check the values of options.

    Args:
        function: the function or class whose parameters are annotated with an `Option`.
        values: values by name, `locals()` for example; names that are no options are ignored.

    Returns:
        The options and their values.

    Raises:
        ValueError: for the first value that is not allowed.

    Example:
        >>> hr.check(hr.Regime, {"epochs": 20, "other": None})
        {'epochs': 20}
        >>> hr.check(hr.Regime, {"epochs": 0})
        Traceback (most recent call last):
        ValueError: epochs must be at least 1, not 0
    """
    given = {name: parameter for name, parameter in parameters(function).items() if name in values}
    for name, parameter in given.items():
        check_value(parameter, values[name])
    return {name: values[name] for name in given}


def check_value(parameter: Parameter, value: Any) -> None:
    """Raise a ValueError if an option may not have this value."""
    name, option = parameter.name, parameter.option
    if not _fits(value, parameter.type):
        raise ValueError(f"{name} must be {wanted(parameter.type)}, not {shown(value)}")
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, int | float) and not isinstance(number, bool):
            if isinstance(number, float) and not math.isfinite(number):
                raise ValueError(f"{name} must be a finite number, not {shown(number)}")
            if option.low is not None and number < option.low:
                raise ValueError(f"{name} must be at least {option.low:g}, not {shown(number)}")
            if option.above is not None and number <= option.above:
                raise ValueError(f"{name} must be greater than {option.above:g}, not {shown(number)}")
            most = LARGEST_WHOLE if isinstance(number, int) and parameter.type is not float else LARGEST
            if number > (high := most if option.high is None else option.high):
                raise ValueError(f"{name} must be at most {high:.10g}, not {shown(number)}")
            if number < -most:
                raise ValueError(f"{name} must be at least {-most:.10g}, not {shown(number)}")


def shown(value: Any) -> str:
    """Return a value for an error message, in few letters."""
    try:
        return shorten(printable(repr(value)), 80)
    except ValueError:  # Python writes no numbers of more than 4,300 digits
        return "a number of thousands of digits"


def complete(entry_name: str, entry: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of an entry, given or by default, each checked."""
    known = parameters(entry)
    expect(f"the options of {entry_name}", options, Mapping, "a dict of names and values")
    for name, value in options.items():
        if name not in known:
            raise ValueError(f"{entry_name} has no option {name!r}; {nearest(name, known)}")
        check_value(known[name], value)
    values = {name: options.get(name, p.default) for name, p in known.items()}
    return {name: float(v) if known[name].type is float else v for name, v in values.items()}


def without_added_defaults(entry: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values without those of options that were added later and have their default: see `Option.added`."""
    added = {name: p.default for name, p in parameters(entry).items() if p.option.added}
    return {name: value for name, value in values.items() if name not in added or value != added[name]}


WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", types.NoneType: "none"}


def wanted(kind: Any) -> str:
    """Return what values of a type are, in words."""
    match get_origin(kind):
        case origin if origin is Literal:
            return "one of " + ", ".join(map(repr, get_args(kind)))
        case origin if origin in (Union, types.UnionType):
            return " or ".join(map(wanted, get_args(kind)))
        case origin if origin is tuple:
            return WORDS[get_args(kind)[0]].removeprefix("a ") + "s"
    return WORDS.get(kind, str(kind))


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value is of a type."""
    origin = get_origin(kind)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(kind))
    if origin in (Union, types.UnionType):
        return any(_fits(value, k) for k in get_args(kind))
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(v, get_args(kind)[0]) for v in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)
