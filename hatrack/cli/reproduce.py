"""`hatrack reproduce NAME`: the tables and figures of a paper, with the published numbers beside ours."""

from pathlib import Path
from typing import Any

import click

from hatrack.cli.group import imported_when_called
from hatrack.cli.options import FOLDER, how_to_run, named, where_to_run
from hatrack.engine.choice import PRECISIONS
from hatrack.options import choose
from hatrack.recipes import RECIPES
from hatrack.text import say

_reproduce = imported_when_called("hatrack.cli.recipes:reproduce")
ALL = "all"
OPTIONS = [
    click.Option(["--only"], metavar="PART,...", default="", help="these parts alone (default: all; --missing names them)"),
    click.Option(["--methods"], metavar="NAME,...", default="", help="the runs of these methods alone (default: all)"),
    click.Option(["--seeds"], metavar="RANGE", help="these seeds in every row: 0-9, or 0,3 (default: each row's own)"),
    click.Option(["--quick"], is_flag=True, help="minutes on a CPU: small, short, on sample images; not the paper's"),
    click.Option(["--missing"], is_flag=True, help="run nothing; tell which rows have no record and what they would cost"),
    click.Option(
        ["--gpus"], type=click.IntRange(1), metavar="N", help="with --missing: tell how long that would take on N GPUs"
    ),
    click.Option(["--page"], is_flag=True, help="run nothing; write the page from the records that are there"),
    click.Option(
        ["--out"], type=FOLDER, default=Path("reproduce"), metavar="FOLDER", help="where pages and records go [reproduce]"
    ),
]


def _how_to_run() -> list[click.Option]:
    """Return the options of every command that runs something; the precision is what a part asks for."""
    precision = click.Option(
        ["--precision"],
        metavar="NAME",
        default="",
        help="of matrix products: tf32, float32 or bfloat16 (default: what a part asks for)",
        callback=lambda _, __, name: choose("precision", name, PRECISIONS) if name else "",
    )
    return [precision if option.name == "precision" else option for option in (*how_to_run(), *where_to_run())]


@click.command(params=[click.Argument(["name"], default="", shell_complete=named(RECIPES)), *OPTIONS, *_how_to_run()])
def command(name: str, **options: Any) -> None:
    """Reproduce a paper: run its rows, continue where it stopped, and write a page with the published numbers.

    NAME is a recipe, or the word all; without it and without options the recipes are listed. A run that has its record is
    not run again.
    """
    wanted = ALL if not name and (options["missing"] or options["page"] or options["quick"]) else name
    names = list(RECIPES) if wanted == ALL else [name] if name else []
    for one in names:
        RECIPES.about(one)
    if not names:
        for one in RECIPES:
            say(f"{one:12} {RECIPES.about(one).summary} {RECIPES.about(one).paper}.")
        say("hatrack reproduce NAME runs one of them; --quick shows in minutes what comes of it")
        return
    _reproduce(names, **options)
