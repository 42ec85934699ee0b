"""From the texts of a command line to values."""

from typing import Any, get_args, get_origin

from hatrack.options import Parameter, check_value, shown, wanted

DEVICES = ("auto", "cpu", "cuda")
MANY = 10_000  # seeds of one range


def convert(parameter: Parameter, text: Any) -> Any:
    """Return the value that an option's text stands for; an error names the option, the value and what was expected."""
    value = text
    try:
        if parameter.choices:
            value = next((c for c in parameter.choices if str(c) == text), text)
        elif get_origin(parameter.type) is tuple:
            value = tuple(get_args(parameter.type)[0](part) for part in text.split(","))
        elif parameter.type in (int, float):
            value = parameter.type(text)
        check_value(parameter, value)
    except ValueError as error:
        said = (
            str(error)
            if parameter.name in str(error)
            else f"{parameter.name} must be {wanted(parameter.type)}, not {shown(text)}"
        )
        raise ValueError("--" + said.replace(parameter.name, parameter.name.replace("_", "-"), 1)) from None
    return value


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
    return list(dict.fromkeys(seeds))


def check_device(name: str) -> str:
    """Return the name, or raise an error if it is none of DEVICES."""
    if name not in DEVICES:
        raise ValueError(f"--device must be auto, cpu or cuda, not {name!r}")
    return name
