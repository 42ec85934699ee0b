"""From the texts of a command line to values, and from a signature to its options."""

import inspect
from typing import Annotated, Any, get_args, get_origin

import torch
import typer
from rich.markup import escape

from hatrack.engine.choice import PAYS
from hatrack.options import Parameter, check_value, wanted

DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda", metavar="NAME")]
MANY = 10_000  # seeds of one range
ENGINE = (
    "how steps run: eager; compiled (half a minute once, then faster); recorded (on a GPU); "
    f"auto: recorded on a GPU, and compiled in fits of {PAYS:,} steps or more"
)
EngineOption = Annotated[str, typer.Option(help=ENGINE, metavar="NAME")]
PrecisionOption = Annotated[
    str, typer.Option(help="of matrix products: tf32 (on a GPU), float32 or bfloat16", metavar="NAME")
]
SaveOption = Annotated[float, typer.Option(help="minutes between saves of a run's state", metavar="N")]
ParallelOption = Annotated[int, typer.Option(help="runs side by side: processes on a CPU, streams on a GPU", metavar="N")]


def option(parameter: Parameter, panel: str) -> inspect.Parameter:
    """A parameter as an option: texts, so that all values are read and checked in one place."""
    flag = "--" + parameter.name.replace("_", "-")
    kind: Any = bool if parameter.type is bool else str
    names = [f"{flag}/--no-{flag[2:]}"] if kind is bool else [flag]
    shown = ",".join(map(str, parameter.default)) if isinstance(parameter.default, tuple) else str(parameter.default)
    text = f"{parameter.option.help} [{shown}]" if shown else parameter.option.help
    info = typer.Option(*names, help=escape(text), metavar=_metavar(parameter), show_default=False, rich_help_panel=panel)
    return inspect.Parameter(
        parameter.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info]
    )


def _metavar(parameter: Parameter) -> str | None:
    if parameter.choices:
        return "|".join(map(str, parameter.choices))
    if parameter.type is bool:
        return None
    return {int: "N", float: "NUMBER", str: "TEXT"}.get(parameter.type, "N,N,...")


def convert(parameter: Parameter, text: Any) -> Any:
    """The value that an option's text stands for; an error names the option, the value and what was expected."""
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
            else f"{parameter.name} must be {wanted(parameter.type)}, not {text!r}"
        )
        raise ValueError("--" + said.replace(parameter.name, parameter.name.replace("_", "-"), 1)) from None
    return value


def parse_seeds(text: str) -> list[int]:
    """0-4 or 0,3,7 or both."""
    seeds: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            start, end = int(first), int(last or first)
            seeds += range(start, end + 1) if end - start < MANY else ()
    except ValueError:
        seeds = []
    if not seeds:
        raise ValueError(f"--seeds must be a range such as 0-4 (of {MANY:,} at most) or a list such as 0,3,7, not {text!r}")
    return list(dict.fromkeys(seeds))


def parse_device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ValueError(f"--device must be auto, cpu or cuda, not {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: no GPU that torch can use was found; --device cpu works everywhere")
    return name
