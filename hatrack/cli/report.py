"""`hatrack report`: a page, figures and a table of the records in a folder."""

from pathlib import Path

import click

from hatrack.cli.group import imported_when_called
from hatrack.cli.options import BUDGET, BUDGET_OF, FOLDER

_report = imported_when_called("hatrack.cli.reporting:make_report")


@click.command()
@click.argument("folder", type=FOLDER)
@click.option("--out", type=FOLDER, metavar="FOLDER", help="where to write the page (default: the same folder)")
@BUDGET
@BUDGET_OF
def command(folder: Path, out: Path | None, budget: str | None, budget_of: str) -> None:
    """Make a page, figures and a table of the records in FOLDER."""
    if not folder.is_dir():
        raise ValueError(f"no folder {str(folder)!r}; hatrack run ... --out {folder} would make one")
    _report(folder, out, budget=budget, budget_of=budget_of)
