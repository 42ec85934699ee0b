"""`hatrack figure`: figures of records for papers."""

from pathlib import Path

import click

from hatrack.cli.group import imported_when_called
from hatrack.cli.options import FOLDER
from hatrack.options import choose
from hatrack.text import say

_figures = imported_when_called("hatrack.reporting.paper_figures:paper_figures")
KINDS = {name: name for name in ("accuracy", "forgetting", "matrix", "capacity", "sweep")}
FORMATS = {name: name for name in ("pdf", "svg", "png")}


@click.command()
@click.argument("folder", type=FOLDER)
@click.argument("kind", metavar="KIND")
@click.option("--format", "form", metavar="NAME", default="pdf", help="pdf, svg or png [pdf]")
@click.option("--out", type=FOLDER, metavar="FOLDER", help="where to write the figures (default: FOLDER/figures)")
def command(folder: Path, kind: str, form: str, out: Path | None) -> None:
    """Draw figures of the records in FOLDER for a paper, one column wide, with fonts embedded.

    KIND is accuracy, forgetting, matrix, capacity or sweep.
    """
    for path in _figures(folder, choose("figure", kind, KINDS), choose("format", form, FORMATS), out):
        say(f"wrote {path}")
