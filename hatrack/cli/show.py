"""`hatrack show`: what a record holds, in the terminal."""

from pathlib import Path

import click

from hatrack.cli.group import imported_when_called
from hatrack.cli.options import FOLDER

_show = imported_when_called("hatrack.cli.showing:show")


@click.command()
@click.argument("record", type=FOLDER)
def command(record: Path) -> None:
    """Show what the record of a run holds: its settings, accuracies, measures and costs, and which commands go on."""
    _show(record)
