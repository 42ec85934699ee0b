"""`hatrack sweep BENCHMARK METHOD`: a grid of runs. Its options are those of `hatrack run`, with several values each."""

from pathlib import Path
from typing import Any, get_origin

import click

from hatrack.cli.group import imported_when_called
from hatrack.cli.options import FOLDER, WATCH, flag, how_to_run, where_to_run
from hatrack.cli.run import NAMES, NETWORK, SEEDS, RunCommand
from hatrack.cli.values import convert_any, show
from hatrack.options import Parameter

TEXT = "Run a method with every combination of several values of its options, and draw how it responds."
SEVERAL = (
    "Every option takes several values with commas between them. Several lists of numbers have semicolons between them: "
    "--widths '300;300,300' tries one layer and two."
)


def several(parameter: Parameter) -> click.Option:
    """Return a parameter as an option with one or several values; it is None if it is not given."""
    lists = get_origin(parameter.type) is tuple
    default = show(parameter.default)

    def read(_: Any, __: Any, given: str | None) -> tuple[Any, ...] | None:
        if given is None:
            return None
        values = tuple(convert_any(parameter, text) for text in given.split(";" if lists else ","))
        if len(set(values)) < len(values):
            raise ValueError(f"{flag(parameter.name)} has a value twice: {given!r}")
        return values

    return click.Option(
        [flag(parameter.name), parameter.name],
        metavar="VALUE;..." if lists else "VALUE,...",
        help=f"{parameter.option.help} [{default}]" if default else parameter.option.help,
        callback=read,
    )


class SweepCommand(RunCommand):
    """A command with the options of `hatrack run`, each with one or several values."""

    make_option = staticmethod(several)
    execute = staticmethod(imported_when_called("hatrack.cli.grid:sweep"))
    texts = (TEXT, SEVERAL)


FIXED = [
    NETWORK,
    *SEEDS,
    click.Option(
        ["--out"], type=FOLDER, default=Path("sweep"), metavar="FOLDER", help="where records and pictures go [sweep]"
    ),
    click.Option(["--dry-run"], is_flag=True, help="run nothing; list what would run and what it would cost"),
    WATCH,
    *how_to_run(),
    *where_to_run(),
]
command = SweepCommand("sweep", params=[*NAMES, *FIXED], short_help=TEXT)
