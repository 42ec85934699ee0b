"""Options of commands: those that a signature declares (see hatrack/options.py), and those that several commands share."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from hatrack.cli.values import DEVICES, check_device, convert, show
from hatrack.engine.choice import ENGINES, PAYS, PRECISIONS
from hatrack.options import Parameter, choose
from hatrack.registry import Registry
from hatrack.tracking.trackers import TRACKERS

Completion = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
ENGINE = (
    "how steps run: eager; compiled (half a minute once, then faster); recorded (on a GPU); "
    f"auto: recorded on a GPU, and compiled in runs of {PAYS['cuda']:,} steps or more ({PAYS['cpu']:,} on a CPU)"
)
FOLDER = click.Path(path_type=Path)
BUDGET = click.option(
    "--budget", metavar="COST=LIMIT,...", help="leave out methods that cost more, in multiples of sgd: bytes=1.5x,steps=2x"
)
BUDGET_OF = click.option("--budget-of", metavar="METHOD", default="sgd", help="the method that sets the budget [sgd]")
KEEP_MODEL = click.Option(["--keep-model"], is_flag=True, help="save the model beside the record, as NAME.safetensors")
WATCH = click.Option(["--watch"], is_flag=True, help="show the runs in the browser while they go on: see hatrack watch")
method_option = click.option(
    "--method", metavar="MODULE:CLASS", default="", help="the class of the model's method, if it is one of your own"
)
trunk_option = click.option(
    "--trunk", metavar="MODULE:NAME", default="", help="a function that makes the model's trunk, if the file does not say it"
)


def flag(name: str) -> str:
    """Return the option of a parameter: --weight-decay of weight_decay."""
    return "--" + name.replace("_", "-")


def from_parameter(parameter: Parameter) -> click.Option:
    """Return a parameter of a signature as an option. It is None if it is not given, and otherwise read and checked."""
    name, kind = flag(parameter.name), parameter.type
    text, default = parameter.option.help, show(parameter.default)
    text = f"{text} [{default}]" if default else text
    if kind is bool:
        return click.Option([f"{name}/--no-{name[2:]}", parameter.name], default=None, help=text)
    choices = list(map(str, parameter.choices))
    return click.Option(
        [name, parameter.name],
        metavar="|".join(choices) or {int: "N", float: "NUMBER", str: "TEXT"}.get(kind, "N,N,..."),
        help=text,
        callback=lambda _, __, given: None if given is None else convert(parameter, given),
        shell_complete=beginning(choices),
    )


def named(table: Registry[Any]) -> Completion:
    """Return the completion of a name in a table, for `shell_complete` of a parameter."""
    return beginning({name: table.about(name).summary for name in table})


def beginning(names: Mapping[str, str] | Iterable[str]) -> Completion:
    """Return the completion of words, perhaps with a text for each."""
    texts = names if isinstance(names, Mapping) else dict.fromkeys(names, "")

    def complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name, help=text or None) for name, text in texts.items() if name.startswith(incomplete)]

    return complete


# Options that several commands share


def _choice(kind: str, choices: Iterable[str], check: Callable[[str], Any], default: str, text: str) -> click.Option:
    """Return an option with a fixed set of values, one of which is the default."""
    return click.Option(
        [f"--{kind}"],
        metavar="NAME",
        default=default,
        help=f"{text} [{default}]",
        callback=lambda _, __, given: check(given),
        shell_complete=beginning(choices),
    )


def how_to_run() -> list[click.Option]:
    """Return the options that decide how runs are carried out, and nothing of their outcome."""
    return [
        log_option(),
        device_option(),
        _choice("engine", ENGINES, lambda name: choose("engine", name, ENGINES), "auto", ENGINE),
        _choice(
            "precision",
            PRECISIONS,
            lambda name: choose("precision", name, PRECISIONS),
            "tf32",
            "of matrix products: tf32 (on a GPU), float32 or bfloat16",
        ),
        click.Option(
            ["--save-every"], type=float, default=5.0, metavar="N", help="minutes between saves of a run's state [5]"
        ),
        click.Option(
            ["--parallel"],
            type=int,
            default=1,
            metavar="N",
            help="runs at a time: processes on a CPU, streams on a GPU [1]",
            callback=lambda _, __, count: _at_least_one(count),
        ),
        click.Option(
            ["--stack"],
            is_flag=True,
            help="do the steps of parallel runs as one step; the same to rounding",
        ),
    ]


def log_option() -> click.Option:
    """Return the option that decides where the results of every epoch go."""
    return click.Option(
        ["--log"],
        multiple=True,
        metavar="NAME",
        help="send every epoch to tensorboard (files in OUT/tensorboard) or wandb; once for each",
        callback=lambda _, __, names: tuple(choose("log", name, TRACKERS) for name in names),
        shell_complete=beginning(TRACKERS),
    )


def where_to_run() -> list[click.Option]:
    """Return the options that decide where runs are carried out: on a cluster, in parts, on several ranks."""
    return [
        click.Option(
            ["--on"],
            default="",
            metavar="ENGINE",
            help="carry the runs out on a cluster: ray (started here), ray:ADDRESS, or slurm",
            shell_complete=beginning(("ray", "slurm")),
        ),
        click.Option(
            ["--ask"],
            default="",
            metavar="NAME=VALUE,...",
            help="what every run asks of --on: gpus=0.25,cpus=2; see the docs",
        ),
        click.Option(["--shard"], default="", metavar="I/N", help="carry out only the I-th of N parts of the runs"),
        click.Option(
            ["--ranks"],
            type=int,
            default=1,
            metavar="N",
            help="processes that share the batches of a run, by torchrun [1]",
            callback=lambda _, __, count: _at_least_one(count, "--ranks"),
        ),
    ]


def device_option() -> click.Option:
    """Return the option that decides where something is computed."""
    return _choice("device", DEVICES, check_device, "auto", "auto, cpu or cuda")


def own_methods() -> click.Option:
    """Return the option that allows to import methods of the user's own that a file names."""
    return click.Option(
        ["--method", "methods"],
        multiple=True,
        metavar="MODULE:CLASS",
        help="a method of your own that the runs use; a file alone never decides what is imported",
    )


def _at_least_one(count: int, name: str = "--parallel") -> int:
    if count < 1:
        raise ValueError(f"{name} must be at least 1, not {count}")
    return count
