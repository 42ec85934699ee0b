"""`hatrack watch`: the page of a folder in the browser while its runs go on."""

from pathlib import Path

import click

from hatrack.cli.group import imported_when_called
from hatrack.cli.options import FOLDER
from hatrack.files.atomic import check_folder

_watch = imported_when_called("hatrack.cli.watching:watch")


@click.command()
@click.argument("folder", type=FOLDER, default=Path("runs"))
@click.option(
    "--port", type=click.IntRange(0, 65535), metavar="N", help="the port (default: 6116, or another if it is taken)"
)
@click.option("--no-open", is_flag=True, help="do not open the browser; print the address")
def command(folder: Path, port: int | None, no_open: bool) -> None:
    """Show the page of FOLDER in the browser while its runs go on [runs].

    It is served on this machine alone. Ctrl-C ends it; the runs go on.
    """
    check_folder(folder, f"hatrack run ... --out {folder} would make one")
    _watch(folder, port, browser=not no_open)
