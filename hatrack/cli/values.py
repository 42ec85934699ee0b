"""From the texts of a command line to values."""

from typing import Any, get_args, get_origin

from hatrack.options import LARGEST_WHOLE, Parameter, check_value, shown, wanted

DEVICES = ("auto", "cpu", "cuda")
MANY = 10_000  # seeds of one range


def convert(parameter: Parameter, text: Any) -> Any:
    """Return the value that an option's text stands for; an error names the option, the value and what was expected."""
    flag = "--" + parameter.name.replace("_", "-")
    try:
        value = _read(parameter, text)
    except ValueError:
        raise ValueError(f"{flag} must be {wanted(parameter.type)}, not {shown(text)}") from None
    try:
        check_value(parameter, value)
    except ValueError as error:
        raise ValueError(str(error).replace(parameter.name, flag, 1)) from None
    return value


def _read(parameter: Parameter, text: Any) -> Any:
    """Return a text as a value of the option's type, whether or not the option allows it."""
    if parameter.choices:
        return next((c for c in parameter.choices if str(c) == text), text)
    if get_origin(parameter.type) is tuple:
        return tuple(get_args(parameter.type)[0](part) for part in text.split(","))
    return parameter.type(text) if parameter.type in (int, float) else text


def convert_any(parameter: Parameter, text: str) -> Any:
    """Return the value that a text stands for, also for an option that is true or false and takes no text by itself."""
    if parameter.type is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"--{parameter.name.replace('_', '-')} must be true or false, not {text!r}")
        return text.lower() == "true"
    return convert(parameter, text)


def show(value: Any) -> str:
    """Return a value as a user would write it."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def parse_seeds(text: str) -> list[int]:
    """Return the seeds that 0-4, or 0,3,7, or both together stand for, each once."""
    seeds: list[int] = []
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            start, end = int(first), int(last if dash else first)
            if not 0 <= end - start < MANY:
                raise ValueError
            seeds += range(start, end + 1)
    except ValueError:
        seeds = []
    if not seeds:
        expected = f"a range such as 0-4 (of {MANY:,} at most) or a list such as 0,3,7"
        raise ValueError(f"--seeds must be {expected}, not {shown(text)}")
    if max(seeds) > LARGEST_WHOLE:
        raise ValueError(f"--seeds must be at most {LARGEST_WHOLE}, not {shown(text)}")
    return list(dict.fromkeys(seeds))


def check_device(name: str) -> str:
    """Return the name, or raise an error if it is none of DEVICES."""
    if name not in DEVICES:
        raise ValueError(f"--device must be auto, cpu or cuda, not {name!r}")
    return name
