"""`hatrack status`: where the runs of a folder stand."""

from pathlib import Path

import click

from hatrack.cli.group import imported_when_called
from hatrack.cli.options import FOLDER

_status = imported_when_called("hatrack.cli.run_status:show")


@click.command(
    params=[
        click.Argument(["folder"], type=FOLDER, default=Path("runs")),
        click.Option(
            ["--page"], is_flag=True, help="write status.html into the folder as well; a browser keeps it up to date"
        ),
        click.Option(
            ["--watch"], type=float, metavar="SECONDS", help="tell it again every so many seconds, until all have ended"
        ),
        click.Option(["--all", "everything"], is_flag=True, help="list the runs that are done as well"),
    ]
)
def command(folder: Path, page: bool, watch: float | None, everything: bool) -> None:
    """Tell which runs of a folder are queued, running, done, stopped or failed, and why.

    FOLDER is the folder of the records, as `run --out` named it [runs]. It works on any machine that has the folder.
    """
    _status(folder, page, watch, everything)
