"""`hatrack demo`: forgetting and its cure, on real images."""

from pathlib import Path

import click

from hatrack.cli.group import imported_when_called
from hatrack.cli.options import FOLDER

_demo = imported_when_called("hatrack.cli.execute:demo")


@click.command()
@click.option("--out", type=FOLDER, default=Path("demo"), metavar="FOLDER", help="where records and the page go [demo]")
def command(out: Path) -> None:
    """Show forgetting and its cure on real images, in about a minute; leaves a page to look at."""
    _demo(out)
