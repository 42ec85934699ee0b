"""`hatrack extend`: go on with more tasks of the sequence from a run that kept its model."""

from pathlib import Path
from typing import Any

import click

from hatrack.cli.group import imported_when_called
from hatrack.cli.options import FOLDER, how_to_run, own_methods

_extend = imported_when_called("hatrack.cli.extension:extend")


@click.command(
    params=[
        click.Argument(["record"], type=FOLDER),
        click.Option(["--tasks"], type=int, required=True, metavar="N", help="the tasks of the longer run, old and new"),
        click.Option(["--keep-each"], is_flag=True, help="keep the model after each task, of a run that kept them"),
        own_methods(),
        *(option for option in how_to_run() if option.name not in ("parallel", "stack")),
    ]
)
def command(record: Path, tasks: int, keep_each: bool, methods: tuple[str, ...], **how: Any) -> None:
    """Go on with more tasks of the sequence from the run of RECORD, whose model was kept (hatrack run ... --keep-model).

    The outcome is the record and the model of a run with N tasks from its beginning, bit for bit; a line says so if it is so
    only to rounding. They lie beside RECORD. If the run also kept the model after each task (--keep-each), no number of the
    record is missing.
    """
    _extend(record, tasks, keep_each, methods, **how)
