"""`hatrack list`: the methods, benchmarks and networks there are, and the options of each."""

import inspect
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hatrack.benchmarks import BENCHMARKS
from hatrack.cli.options import flag, named
from hatrack.cli.values import convert, show
from hatrack.methods import METHODS
from hatrack.networks import NETWORKS
from hatrack.options import choose, complete, nearest, offered, parameters
from hatrack.registry import Entry, Registry
from hatrack.text import printable, say

TABLES: dict[str, Registry[Any]] = {"method": METHODS, "benchmark": BENCHMARKS, "network": NETWORKS}
ALL: Registry[Any] = Registry("method, benchmark or network", {n: t.about(n) for t in TABLES.values() for n in t})


@click.command()
@click.argument("name", default="", shell_complete=named(ALL))
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="of a benchmark's tasks [0]")
@click.option("--data", default="", metavar="NAME", help="of a benchmark's tasks: full or sample")
@click.option("--tasks", "asked", default="", metavar="N|FILE", help="of a benchmark: how many tasks; of own: its TOML file")
def command(name: str, seed: int | None, data: str, asked: str) -> None:
    """Show methods, benchmarks and networks; or one of them with its options, and the tasks of a benchmark.

    NAME is a method, benchmark or network, or a method of your own as MODULE:CLASS.
    """
    if name not in BENCHMARKS and (seed is not None or data or asked):
        wanted = f"the name of a benchmark, not {name!r}; {nearest(name, BENCHMARKS)}"
        raise ValueError(f"--seed, --data and --tasks need {wanted}")
    own, problem, asks = Group(), None, bool(seed is not None or data or asked)
    if name in BENCHMARKS:
        try:
            own = Group(tasks(name, seed or 0, data, asked))
        except (OSError, ValueError) as error:
            if asks and isinstance(error, ValueError):
                raise
            problem = error
    Console().print(entry(name) if name else everything(), own)
    if problem and asks:
        raise problem
    if problem:
        say(f"The tasks can't be shown: {printable(problem)}")


PAPERS = (
    "Papers by number: 000 HAT on ResNet-18 (Dinu 2019), 001 HAT (Serrà et al. 2018), 002 EWC on a convolutional network, "
    "003 PMASK (Raskoti, Ghimire), 004 training regimes (Mirzadeh et al. 2020)."
)


def everything() -> RenderableType:
    """Return a table for each kind."""
    return Group(*(_table(f"{kind}s", table) for kind, table in TABLES.items()), Text(PAPERS, style="dim"))


def _table(title: str, entries: Registry[Any]) -> Table:
    table = Table(title=title.capitalize(), title_justify="left", box=None, show_header=False, padding=(0, 2, 0, 0))
    for name in entries:
        row = entries.about(name)
        table.add_row(Text(name, style="bold"), Text(row.summary))
        if row.paper:
            facts = f"{row.paper}; needs: {row.needs}; costs: {row.costs}; scenarios: {', '.join(row.scenarios)}"
            table.add_row("", Text(facts, style="dim"))
    table.add_section()
    return table


def entry(name: str) -> RenderableType:
    """Return one of them, with every option, its default and what it may be."""
    kind, found, row = _find(name)
    table = Table(
        "option", "default", "what it is", title=f"{kind} {name}", title_justify="left", box=None, padding=(0, 2, 0, 0)
    )
    for p in offered(found).values():
        choices = f" ({', '.join(map(str, p.choices))})" if p.choices else ""
        table.add_row(flag(p.name), show(p.default), Text(p.option.help + choices))
    facts = [f"{what}: {getattr(row, what)}" for what in ("paper", "needs", "costs") if getattr(row, what)]
    facts += [f"scenarios: {', '.join(found.scenarios)}"] if kind == "method" else []
    return Group(*_paragraphs(found), *map(Text, facts), "", table)


def _paragraphs(found: Any) -> list[Text]:
    """Return the paragraphs of a docstring before its Args, each as one line that the terminal breaks."""
    before = inspect.cleandoc(found.__doc__ or "").partition("\n\nArgs:")[0]
    return [Text(" ".join(paragraph.split()) + "\n") for paragraph in before.split("\n\n")]


def _find(name: str) -> tuple[str, Any, Entry]:
    """Return the kind, the class or function, and the row of its table; of a user's own method an empty row."""
    if NETWORKS.in_family(name):
        return "network", NETWORKS.find(name), Entry(name, "")
    if ":" in name:
        return "method", METHODS.find(name), Entry(name, "")
    kinds = {n: kind for kind, table in TABLES.items() for n in table}
    kind = choose(ALL.kind, name, kinds)
    return kind, TABLES[kind][name], TABLES[kind].about(name)


def tasks(name: str, seed: int, data: str = "", asked: str = "") -> RenderableType:
    """Return a table of the tasks of a benchmark.

    Args:
        name: the benchmark.
        seed: decides its tasks.
        data: "full" or "sample"; "" for the benchmark's default.
        asked: what its option `tasks` is given: a number, or the file of the user's own tasks; "" for its default.
    """
    sequence = BENCHMARKS[name]
    known, given = parameters(sequence), {"data": data} if data else {}
    if asked:
        given["tasks"] = convert(known["tasks"], asked) if "tasks" in known else asked
    made = sequence(seed, **complete(name, sequence, given))
    network = BENCHMARKS.about(name).network
    classes = sum(task.classes for task in made)
    counts = f"{len(made)} task{'s' * (len(made) != 1)} at seed {seed}, {classes} class{'es' * (classes != 1)}"
    title = f"{counts}; network {network}"
    columns = ("task", "name", "classes", "train", "valid", "test", "image")
    table = Table(*columns, title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in (table.columns[k] for k in (0, 2, 3, 4, 5)):
        column.justify = "right"
    for task in made:
        sizes = (f"{len(split):,}" for split in (task.train, task.valid, task.test))
        table.add_row(str(task.index), Text(task.name), str(task.classes), *sizes, "x".join(map(str, task.shape)))
    return Group("", table)
