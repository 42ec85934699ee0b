"""`hatrack resume`: continue the runs of a folder that were stopped."""

from pathlib import Path
from typing import Any

import click

from hatrack.cli.group import imported_when_called
from hatrack.cli.options import FOLDER, WATCH, how_to_run, own_methods, where_to_run
from hatrack.files.atomic import check_folder

_resume = imported_when_called("hatrack.cli.execute:resume")


FIXED = [click.Argument(["folder"], type=FOLDER, default=Path("runs")), own_methods(), WATCH]


@click.command(params=[*FIXED, *how_to_run(), *where_to_run()])
def command(folder: Path, methods: tuple[str, ...], **how: Any) -> None:
    """Continue the runs in a folder that were stopped before their end.

    FOLDER is the folder of the records, as `run --out` named it, or the folder NAME.part of one run [runs].
    """
    check_folder(folder)
    _resume(folder, methods, **how)
