"""What `hatrack list` shows: the methods, benchmarks and networks there are, and the options of each."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hatrack.benchmarks import BENCHMARKS
from hatrack.experiments.run import complete
from hatrack.methods import METHODS
from hatrack.methods.method import Method
from hatrack.networks import NETWORKS
from hatrack.options import choose, parameters

TABLES: dict[str, Mapping[str, Callable[..., Any]]]
TABLES = {"method": METHODS, "benchmark": BENCHMARKS, "network": NETWORKS}


def summary(entry: Callable[..., Any]) -> str:
    """The first paragraph of its documentation."""
    return " ".join((inspect.getdoc(entry) or "").split("\n\n")[0].split())


def everything() -> RenderableType:
    """A table for each kind."""
    return Group(*(_table(f"{kind}s", entries) for kind, entries in TABLES.items()))


def _table(title: str, entries: Mapping[str, Callable[..., Any]]) -> Table:
    table = Table(title=title.capitalize(), title_justify="left", box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, entry in entries.items():
        table.add_row(Text(name, style="bold"), Text(summary(entry)))
        if isinstance(entry, type) and issubclass(entry, Method):
            row = METHODS.about(name)
            table.add_row("", Text(f"{row.paper}; needs: {row.needs}; costs: {row.costs}", style="dim"))
    table.add_section()
    return table


def entry(name: str) -> RenderableType:
    """One of them, with every option, its default and what it may be."""
    known = {n: (kind, e) for kind, entries in TABLES.items() for n, e in entries.items()}
    kind, found = choose("method, benchmark or network", name, known)
    table = Table(
        "option", "default", "what it is", title=f"{kind} {name}", title_justify="left", box=None, padding=(0, 2, 0, 0)
    )
    for p in parameters(found).values():
        choices = f" ({', '.join(map(str, p.choices))})" if p.choices else ""
        default = ",".join(map(str, p.default)) if isinstance(p.default, tuple) else str(p.default)
        table.add_row(f"--{p.name.replace('_', '-')}", default, Text(p.option.help + choices))
    facts = (
        [f"{what}: {getattr(METHODS.about(name), what)}" for what in ("paper", "needs", "costs")] if kind == "method" else []
    )
    return Group(Text(inspect.cleandoc(found.__doc__ or "").split("\n\nArgs:")[0]), *map(Text, facts), "", table)


def tasks(name: str, seed: int, data: str = "") -> RenderableType:
    """The tasks of a benchmark, made for that seed; `data`: full or sample, empty for its default."""
    sequence = BENCHMARKS[name]
    made = sequence(seed, **complete(name, sequence, {"data": data} if data else {}))
    network = BENCHMARKS.about(name).network
    title = f"{len(made)} tasks at seed {seed}, {sum(task.classes for task in made)} classes; network {network}"
    columns = ("task", "name", "classes", "train", "valid", "test", "image")
    table = Table(*columns, title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in (table.columns[k] for k in (0, 2, 3, 4, 5)):
        column.justify = "right"
    for task in made:
        sizes = (f"{len(split):,}" for split in (task.train, task.valid, task.test))
        table.add_row(str(task.index), Text(task.name), str(task.classes), *sizes, "x".join(map(str, task.shape)))
    return Group("", table)
