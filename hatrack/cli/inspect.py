"""`hatrack inspect`: what each task uses of a network, what they share, and what is free."""

from pathlib import Path

import click

from hatrack.cli.group import imported_when_called
from hatrack.cli.options import FOLDER, method_option, trunk_option

_inspect = imported_when_called("hatrack.cli.inspection:inspect")


@click.command()
@click.argument("thing", metavar="RECORD|MODEL", type=FOLDER)
@click.option("--pictures", type=FOLDER, metavar="FOLDER", help="draw the masks of every layer of a model into this folder")
@trunk_option
@method_option
def command(thing: Path, pictures: Path | None, trunk: str, method: str) -> None:
    """Show what each task uses of a network, for methods with masks: the record of a run, or a saved model."""
    _inspect(thing, pictures, trunk, method)
