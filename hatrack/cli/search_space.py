"""From the text of `hatrack tune --over` to a search space, and the spaces that are searched by default."""

from collections.abc import Collection, Mapping
from itertools import product
from typing import Any

from hatrack.cli.values import convert, convert_any
from hatrack.experiments.tuning_space import Axis, Choices, Range, Space
from hatrack.methods import METHODS
from hatrack.options import Parameter, nearest, parameters, shown
from hatrack.regime import BELONGS, Regime

EXAMPLE = "strength=1:10000:log,lr=0.01:0.1:log"
SGD_RATES, ADAM_RATES = "0.01:0.2:log", "0.0001:0.01:log"
RATE = f"lr={SGD_RATES}"
DEFAULT_SPACES = {  # wide around the default of every method; a method that is not here has the learning rate only
    "ewc": f"strength=1:100000:log,{RATE}",
    "si": f"c=0.001:10:log,{RATE}",
    "mas": f"strength=0.01:100:log,{RATE}",
    "imm-mean": f"strength=1e-6:0.1:log,{RATE}",
    "imm-mode": f"strength=1e-5:1:log,{RATE}",
    "lwf": f"strength=0.1:100:log,{RATE}",
    "lfl": f"strength=1e-5:0.1:log,{RATE}",
    "hat": f"c=0.05:5:log,smax=50:1000:log,{RATE}",
    "pmask": f"c=0.05:5:log,smax=50:1000:log,{RATE}",
    "packnet": f"prune=0.3:0.9,{RATE}",
    "derpp": f"alpha=0.05:2:log,beta=0.05:2:log,{RATE}",
    "stable-sgd": f"first_lr={SGD_RATES},lr_decay=0.5:1,drop=0:0.5",
}
DECIDING = {"steps", *(of for of, _ in BELONGS.values())}  # options of the regime that decide whether others have an effect


def space_of(method: str, over: str | None, given: Mapping[str, Mapping[str, Any]]) -> dict[str, Axis]:
    """Return the space that is searched for a method.

    Args:
        method: the name of the method.
        over: the text of `--over`; None for the default space, without the options that were given.
        given: the options for which the user chose a value, by what they belong to.

    Raises:
        ValueError: the text names no options of the method or of the regime, or values that they may not have.
    """
    fixed = {*given.get("method_options", {}), *given.get("regime", {})}
    if over is None:
        known = parse_space(default_space(method, given.get("regime", {})), method)
        if not (space := {name: axis for name, axis in known.items() if name not in fixed}):
            raise ValueError(f"all options of the default space of {method} are given; --over names others, as {EXAMPLE}")
    else:
        space = parse_space(over, method)
        if twice := sorted(fixed & space.keys()):
            raise ValueError(f"--{_flag(twice[0])} has a value and is also in --over")
    _check_effect(method, space, given.get("regime", {}))
    return space


def default_space(method: str, regime: Mapping[str, Any]) -> str:
    """Return the text of the space that is searched for a method by default.

    Args:
        method: the name of the method.
        regime: the options of the regime that were given. Adam needs smaller learning rates than SGD.
    """
    text = DEFAULT_SPACES.get(method, RATE)
    return text.replace(SGD_RATES, ADAM_RATES) if regime.get("optimizer") in ("adam", "adamw") else text


def parse_space(text: str, method: str) -> dict[str, Axis]:
    """Return the space that a text stands for: NAME=LOW:HIGH, NAME=LOW:HIGH:log or NAME=X|Y|Z, with commas between them."""
    known = {**parameters(Regime), **parameters(METHODS.find(method))}
    space: dict[str, Axis] = {}
    for part in text.split(","):
        word, equals, values = (piece.strip() for piece in part.partition("="))
        if not word or not equals or not values:
            raise ValueError(f"--over must be a list such as {EXAMPLE}, not {shown(text)}")
        name = word.replace("-", "_")
        if name not in known:
            raise ValueError(f"--over: neither {method} nor the regime has an option {word!r}; {nearest(name, known)}")
        if name in space:
            raise ValueError(f"--over names {word} twice")
        space[name] = _axis(known[name], values)
    return space


def _axis(parameter: Parameter, text: str) -> Axis:
    """Return the range or the choices of one option."""
    name = _flag(parameter.name)
    if "|" in text:
        values = tuple(convert_any(parameter, word) for word in text.split("|"))
        if len(set(values)) < len(values):
            raise ValueError(f"--over {name} has a value twice: {shown(text)}")
        return Choices(values)
    low, colon, rest = text.partition(":")
    high, log, scale = rest.partition(":")
    if not colon or (log and scale != "log"):
        raise ValueError(f"--over {name} must be LOW:HIGH, LOW:HIGH:log or choices X|Y|Z, not {shown(text)}")
    if parameter.type not in (int, float):
        raise ValueError(f"--over {name} takes choices such as X|Y|Z, not the range {shown(text)}")
    start, end = convert(parameter, low), convert(parameter, high)
    if not start < end:
        raise ValueError(f"--over {name} must have its lower end first, not {shown(text)}")
    if log and not start > 0:
        raise ValueError(f"--over {name} must begin above 0 to be on a log scale, not {shown(text)}")
    return Range(start, end, log=bool(log), whole=parameter.type is int)


def _check_effect(method: str, space: Space, regime: Mapping[str, Any]) -> None:
    """Raise an error if an option of the regime, searched or given, has an effect in no trial, as `hatrack run` does.

    An option that has an effect with some of the values that are searched is accepted: patience with the schedules
    plateau|constant.
    """
    found = METHODS.find(method)
    own: Collection[str] = parameters(found)
    searched = [name for name in space if name not in own]
    deciding = {name: _ends(space[name]) for name in searched if name in DECIDING}
    regimes = [Regime(**{**regime, **dict(zip(deciding, v, strict=True))}) for v in product(*deciding.values())]
    for name in (*regime, *searched):
        errors = []
        for one in regimes:
            try:
                one.check_effect([name], method, found.replaces)
            except ValueError as error:
                errors.append(error)
        if len(errors) == len(regimes):
            raise errors[0]


def _ends(axis: Axis) -> tuple[Any, ...]:
    """Return all choices, or the two ends of a range."""
    return axis.values if isinstance(axis, Choices) else (axis.low, axis.high)


def _flag(name: str) -> str:
    return name.replace("_", "-")
