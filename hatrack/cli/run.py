"""`hatrack run BENCHMARK METHOD`: its options are those of everything that the command line names."""

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import click

from hatrack.benchmarks import BENCHMARKS
from hatrack.cli.group import imported_when_called
from hatrack.cli.options import (
    FOLDER,
    KEEP_MODEL,
    WATCH,
    flag,
    from_parameter,
    how_to_run,
    named,
    own_methods,
    where_to_run,
)
from hatrack.experiments.spec import Run
from hatrack.methods import METHODS
from hatrack.networks import NETWORKS
from hatrack.options import Parameter, offered
from hatrack.regime import Regime
from hatrack.registry import Registry

TABLES: dict[str, Registry[Any]] = {"method": METHODS, "benchmark": BENCHMARKS, "network": NETWORKS}
ORDER = "the names come first, then the options: hatrack run BENCHMARK METHOD ..."
TEXT = "Run a method, or several with commas between them, on a benchmark and keep the records. The names come first."
MORE = "hatrack run BENCHMARK METHOD --help shows the options of those two as well; hatrack list shows the names."
OWN = "A method of your own is named MODULE:CLASS, for a class in a Python file of this folder or on Python's path."


class Section(NamedTuple):
    """The options of one thing that the command line names, as the help shows them and `Run` takes them."""

    key: str  # the argument of Run
    title: str
    options: list[click.Option]


MakeOption = Callable[[Parameter], click.Option]


# What the command line names


def names_in(args: Sequence[str]) -> dict[str, str]:
    """Return the benchmark, methods and network that a command line names, so far as it does."""
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


def sections_of(names: Mapping[str, str], make_option: MakeOption = from_parameter) -> list[Section]:
    """Return the options of a run with these names: the methods' own first, the common ones last.

    An option that several methods have is shown with the first of them.
    """
    tables, shown = list[tuple[str, str, Mapping[str, Parameter]]](), set[str]()
    for kind, table in TABLES.items():
        for name in names.get(kind, "").split(",") if kind in names else ():
            known = {key: p for key, p in offered(table.find(name)).items() if kind != "method" or key not in shown}
            shown |= set(known) if kind == "method" else set()
            tables.append((f"{kind}_options", f"{kind.capitalize()} {name}", known))
    tables += [("regime", "Regime", offered(Regime)), ("run", "Run", offered(Run))]
    found = [Section(key, title, list(map(make_option, known.values()))) for key, title, known in tables]
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
    return [key for table in TABLES.values() for key in table if names & set(map(flag, offered(table[key])))]


# The command


class RunCommand(click.Command):
    """A command whose options depend on its first two words and on `--network`.

    Attributes:
        make_option: makes an option of a parameter.
        execute: carries out the runs.
        texts: what the command does, for its help.
    """

    make_option: MakeOption = staticmethod(from_parameter)
    execute: Callable[..., Any] = staticmethod(imported_when_called("hatrack.cli.execute:run"))
    texts: tuple[str, ...] = ()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Find the options of what is named, then read them."""
        names: dict[str, str] = {}
        if FROM in self.params and any(word.partition("=")[0] == "--from" for word in args):
            return self.parse_repeated(ctx, args)
        if ctx.resilient_parsing:  # a completion, which must not wait for torch: the options of a method are unknown
            ctx.ignore_unknown_options = True
        else:
            names = self.names(args)
            ctx.meta[__name__] = sections_of(names, self.make_option)
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

    def parse_repeated(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the options of a run that repeats another: only how it is computed may be chosen."""
        ctx.meta[REPEATS] = ctx.allow_extra_args = True
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.possibilities:  # a slip of the pen
                raise
            rest = [error.option_name]
        if not rest:
            return rest
        flags = [max(option.opts, key=len) for option in self.get_params(ctx) if option not in (FROM, HELP)]
        raise click.UsageError(
            f"{rest[0]!r} does not go with --from, which repeats the run as its record says, compares the results and keeps "
            f"nothing; with it go {', '.join(flag for flag in flags if flag != '--help')}",
            ctx,
        )

    def names(self, args: Sequence[str]) -> dict[str, str]:
        """Return the benchmark, methods and network whose options the command has."""
        return names_in(args)

    def sections(self, ctx: click.Context) -> list[Section]:
        """Return the options by what they belong to."""
        if __name__ not in ctx.meta:
            ctx.meta[__name__] = sections_of({}, self.make_option)
        found: list[Section] = ctx.meta[__name__]
        return found

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the names and all the options."""
        if ctx.meta.get(REPEATS):
            how = [option for option in how_to_run() if option.name != "log"]  # nothing of a repeated run is kept
            return [FROM, own_methods(), *how, *filter(None, [self.get_help_option(ctx)])]
        return [*super().get_params(ctx), *(option for part in self.sections(ctx) for option in part.options)]

    def invoke(self, ctx: click.Context) -> Any:
        """Sort the values that were given by what they belong to, and carry out the runs; or repeat the run of a record."""
        values = dict(ctx.params)
        if ctx.meta.get(REPEATS):
            return ctx.invoke(_repeat, **values)
        values.pop(str(FROM.name), None)
        given: dict[str, dict[str, Any]] = {}
        for part in self.sections(ctx):
            read = {option.name: values.pop(option.name) for option in part.options if option.name}
            given.setdefault(part.key, {}).update({name: value for name, value in read.items() if value is not None})
        return ctx.invoke(self.execute, given=given, **values)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return the words after the command's name."""
        return ["BENCHMARK", "METHOD", "[OPTIONS]"]

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what the command does; without the two names also how to see more."""
        texts = self.texts or ((TEXT, OWN) if len(self.sections(ctx)) > 3 else (TEXT, MORE, OWN))
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


_repeat = imported_when_called("hatrack.cli.repeat:repeat")
REPEATS = f"{__name__}.repeats"  # in the meta table of a context: the command line has --from
FROM = click.Option(
    ["--from", "record"],
    type=FOLDER,
    metavar="RECORD.json",
    help="repeat the run of this record, without names and options, and say whether the results are the same",
)
NAMES = [
    click.Argument(["benchmark"], shell_complete=named(BENCHMARKS)),
    click.Argument(["method"], shell_complete=named(METHODS)),
]
NETWORK = click.Option(
    ["--network"],
    default="",
    metavar="NAME",
    help="the trunk (default: the benchmark's own)",
    shell_complete=named(NETWORKS),
)
SEEDS = [
    click.Option(["--seed"], type=int, metavar="N", help="the seed [0]"),
    click.Option(["--seeds"], metavar="RANGE", help="several seeds: 0-4, or 0,3,7"),
]
FIXED = [
    NETWORK,
    *SEEDS,
    click.Option(["--out"], type=FOLDER, default=Path("runs"), metavar="FOLDER", help="where records go [runs]"),
    click.Option(["--again"], is_flag=True, help="run even if there is a record of this run"),
    click.Option(
        ["--with-references"], is_flag=True, help="run joint and random as well, for the forgetting ratio, and independent"
    ),
    KEEP_MODEL,
    click.Option(
        ["--keep-each"], is_flag=True, help="save the model after each task as NAME.task-1.safetensors, ..., for flatness"
    ),
    click.Option(
        ["--tuned"],
        multiple=True,
        type=FOLDER,
        metavar="FILE.json",
        help="take options from the outcome of hatrack tune; options given here win; once per method",
    ),
    click.Option(["--dry-run"], is_flag=True, help="run nothing; list what would run and what it would cost"),
    FROM,
    WATCH,
    *how_to_run(),
    *where_to_run(),
]
HELP = click.Option(["-h", "--help"])  # a name that no method may use
command = RunCommand("run", params=[*NAMES, *FIXED], short_help=TEXT)
