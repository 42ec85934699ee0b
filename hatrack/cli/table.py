"""`hatrack table`: the ranking of records as a table for a paper."""

from pathlib import Path

import click

from hatrack.cli.group import imported_when_called
from hatrack.cli.options import BUDGET, BUDGET_OF, FOLDER
from hatrack.options import choose

_table = imported_when_called("hatrack.cli.tables:table")
FORMATS = {name: name for name in ("markdown", "latex", "csv")}


@click.command()
@click.argument("folder", type=FOLDER)
@click.option("--format", "form", metavar="NAME", default="markdown", help="markdown, latex or csv [markdown]")
@click.option("--out", type=FOLDER, metavar="FILE", help="the file to write (default: standard output)")
@BUDGET
@BUDGET_OF
def command(folder: Path, form: str, out: Path | None, budget: str | None, budget_of: str) -> None:
    """Print the ranking of the records in FOLDER as a table for a paper.

    Options in which methods differ are columns. The accuracy of a method that is ahead of all others by the test is bold.
    """
    _table(folder, choose("format", form, FORMATS), out, budget, budget_of)
