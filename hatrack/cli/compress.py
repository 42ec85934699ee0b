"""`hatrack compress BENCHMARK --task NAME`: one task in as few weights as it needs, beside plain SGD (HAT, figure 7)."""

from collections.abc import Sequence
from pathlib import Path

import click

from hatrack.benchmarks import BENCHMARKS
from hatrack.cli.group import imported_when_called
from hatrack.cli.options import FOLDER, KEEP_MODEL, from_parameter, how_to_run, named
from hatrack.cli.run import NETWORK, SEEDS, RunCommand
from hatrack.options import Parameter

METHODS = ("hat", "pmask")  # whose gates are learned and have a price
DEFAULTS = {  # of HAT, section 4.4: more compression, every unit open at first; and of its authors' code, see the option
    "c": 1.5,
    "embedding": "uniform",
    "validation": "total",
}
TEXT = "Train one task in as few weights as it needs, and show its accuracy against its size, beside plain SGD."
MORE = "hatrack compress BENCHMARK --help shows the options of the benchmark, its network and the method as well."
ORDER = "the name of a benchmark comes first, then the options: hatrack compress BENCHMARK --task NAME ..."


def with_default(parameter: Parameter) -> click.Option:
    """Return a parameter as an option; those that compression sets otherwise show the value that it sets."""
    return from_parameter(parameter._replace(default=DEFAULTS.get(parameter.name, parameter.default)))


class CompressCommand(RunCommand):
    """A command with the options of `hatrack run`, whose method is an option too."""

    make_option = staticmethod(with_default)
    execute = staticmethod(imported_when_called("hatrack.cli.compression:compress"))
    texts = (TEXT, MORE)

    def names(self, args: Sequence[str]) -> dict[str, str]:
        """Return the benchmark, the method and the network whose options the command has."""
        if not args or args[0].startswith("-"):
            if args and not {"-h", "--help"} & set(args):
                raise ValueError(ORDER)
            return {}
        given = _ONLY_NAMES.make_context("compress", list(args)).params
        return {
            "benchmark": args[0],
            "method": given["method"],
            "network": given["network"] or BENCHMARKS.about(args[0]).network,
        }

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return the words after the command's name."""
        return ["BENCHMARK", "--task", "NAME", "[OPTIONS]"]


METHOD = click.Option(
    ["--method"], type=click.Choice(METHODS), default="hat", help="gates per unit (hat) or per weight (pmask) [hat]"
)
_ONLY_NAMES = click.Command(
    "compress",
    params=[METHOD, click.Option(["--network"])],
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
command = CompressCommand(
    "compress",
    params=[
        click.Argument(["benchmark"], shell_complete=named(BENCHMARKS)),
        click.Option(["--task"], required=True, metavar="NAME", help="the task, by its name or its number from 0"),
        METHOD,
        NETWORK,
        *SEEDS,
        click.Option(
            ["--out"],
            type=FOLDER,
            default=Path("compress"),
            metavar="FOLDER",
            help="where records and results go [compress]",
        ),
        KEEP_MODEL,
        *how_to_run(),
    ],
    short_help=TEXT,
)
