"""`hatrack run BENCHMARK METHOD`: its options are those of everything that the command line names."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import click

from hatrack.benchmarks import BENCHMARKS
from hatrack.cli.group import imported_when_called
from hatrack.cli.options import FOLDER, flag, from_parameter, how_to_run, named
from hatrack.experiments.spec import Run
from hatrack.methods import METHODS
from hatrack.networks import NETWORKS
from hatrack.options import Parameter, parameters
from hatrack.regime import Regime
from hatrack.registry import Registry

TABLES: dict[str, Registry[Any]] = {"method": METHODS, "benchmark": BENCHMARKS, "network": NETWORKS}
ORDER = "the names come first, then the options: hatrack run BENCHMARK METHOD ..."
TEXT = "Run a method on a benchmark and keep the record. The two names come first, then options."
MORE = "hatrack run BENCHMARK METHOD --help shows the options of those two as well; hatrack list shows the names."
OWN = "A method of your own is named MODULE:CLASS, for a class in a Python file of this folder or on Python's path."


class Section(NamedTuple):
    """The options of one thing that the command line names, as the help shows them and `Run` takes them."""

    key: str  # the argument of Run
    title: str
    options: list[click.Option]


def section(key: str, title: str, known: Mapping[str, Parameter]) -> Section:
    """Return the section of these parameters."""
    return Section(key, title, list(map(from_parameter, known.values())))


# What the command line names


def names_in(args: Sequence[str]) -> dict[str, str]:
    """Return the benchmark, method and network that a command line names, so far as it does."""
    names = dict(zip(("benchmark", "method"), takewhile(lambda word: not word.startswith("-"), args), strict=False))
    if args and not names and not {"-h", "--help"} & set(args):
        raise ValueError(ORDER)
    if len(names) == 2:
        given = _ONLY_NETWORK.make_context("run", list(args)).params["network"]
        names["network"] = given or BENCHMARKS.about(names["benchmark"]).network
    return names


_ONLY_NETWORK = click.Command(
    "run",
    params=[click.Option(["--network"])],
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)


def sections_of(names: Mapping[str, str]) -> list[Section]:
    """Return the options of a run with these names: the method's own first, the common ones last."""
    found = []
    for kind, table in TABLES.items():
        if kind in names:
            known = parameters(table.find(names[kind]))
            found.append(section(f"{kind}_options", f"{kind.capitalize()} {names[kind]}", known))
    found += [section("regime", "Regime", parameters(Regime)), section("run", "Run", parameters(Run))]
    _check_unique(found)
    return found


def _check_unique(found: Sequence[Section]) -> None:
    """Raise an error if a user's own method has an option that something else in the run has too."""
    owners = {name: "every run" for option in [*FIXED, HELP] for name in option.opts}
    for part in reversed(found):
        for name in (name for option in part.options for name in (*option.opts, *option.secondary_opts)):
            if name in owners:
                raise ValueError(f"{part.title} has an option {name}, which {owners[name]} has too; give it another name")
        owners |= {name: part.title for option in part.options for name in (*option.opts, *option.secondary_opts)}


def owners_of(option: str) -> list[str]:
    """Return the methods, benchmarks and networks that have an option."""
    names = {option, option.replace("--no-", "--", 1)}
    return [key for table in TABLES.values() for key in table if names & set(map(flag, parameters(table[key])))]


# The command


class RunCommand(click.Command):
    """A command whose options depend on its first two words and on `--network`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Find the options of what is named, then read them."""
        names: dict[str, str] = {}
        if ctx.resilient_parsing:  # a completion, which must not wait for torch: the options of a method are unknown
            ctx.ignore_unknown_options = True
        else:
            names = names_in(args)
            ctx.meta[__name__] = sections_of(names)
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if owners := owners_of(error.option_name):
                said = f"No such option: {error.option_name} in this run; these have it: {', '.join(owners)}"
                raise click.UsageError(said, ctx) from None
            raise
        if not ctx.resilient_parsing and len(names) < 2:
            raise ValueError(ORDER)  # a name after an option
        return rest

    def sections(self, ctx: click.Context) -> list[Section]:
        """Return the options by what they belong to."""
        if __name__ not in ctx.meta:
            ctx.meta[__name__] = sections_of({})
        found: list[Section] = ctx.meta[__name__]
        return found

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the names and all the options."""
        return [*super().get_params(ctx), *(option for part in self.sections(ctx) for option in part.options)]

    def invoke(self, ctx: click.Context) -> Any:
        """Sort the values that were given by what they belong to, and carry out the runs."""
        values = dict(ctx.params)
        given: dict[str, dict[str, Any]] = {}
        for part in self.sections(ctx):
            read = {option.name: values.pop(option.name) for option in part.options if option.name}
            given[part.key] = {name: value for name, value in read.items() if value is not None}
        return ctx.invoke(_run, given=given, **values)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return the words after the command's name."""
        return ["BENCHMARK", "METHOD", "[OPTIONS]"]

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what the command does; without the two names also how to see more."""
        texts = [TEXT, OWN] if len(self.sections(ctx)) > 3 else [TEXT, MORE, OWN]
        for text in texts:
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_text(text)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under a heading for each thing that they belong to."""
        *first, last = self.sections(ctx)
        common = [option for option in super().get_params(ctx) if isinstance(option, click.Option)]
        for part in [*first, Section("", last.title, [*last.options, *common])]:
            if part.options:
                with formatter.section(part.title):
                    formatter.write_dl(filter(None, (option.get_help_record(ctx) for option in part.options)))


_run = imported_when_called("hatrack.cli.execute:run")
NAMES = [
    click.Argument(["benchmark"], shell_complete=named(BENCHMARKS)),
    click.Argument(["method"], shell_complete=named(METHODS)),
]
FIXED = [
    click.Option(
        ["--network"],
        default="",
        metavar="NAME",
        help="the trunk (default: the benchmark's own)",
        shell_complete=named(NETWORKS),
    ),
    click.Option(["--seed"], type=int, metavar="N", help="the seed [0]"),
    click.Option(["--seeds"], metavar="RANGE", help="several seeds: 0-4, or 0,3,7"),
    click.Option(["--out"], type=FOLDER, default=Path("runs"), metavar="FOLDER", help="where records go [runs]"),
    click.Option(["--again"], is_flag=True, help="run even if there is a record of this run"),
    *how_to_run(),
]
HELP = click.Option(["-h", "--help"])  # a name that no method may use
command = RunCommand("run", params=[*NAMES, *FIXED], short_help=TEXT)
