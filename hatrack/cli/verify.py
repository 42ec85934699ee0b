"""`hatrack verify`: whether every task of an earlier model is, bit for bit, in a later one."""

from pathlib import Path

import click

from hatrack.cli.group import imported_when_called
from hatrack.cli.options import FOLDER, method_option, trunk_option

_verify = imported_when_called("hatrack.cli.certificates:verify")


@click.command()
@click.argument("new", type=FOLDER)
@click.option("--against", type=FOLDER, metavar="FILE", required=True, help="the earlier model, or its certificate")
@trunk_option
@method_option
def command(new: Path, against: Path, trunk: str, method: str) -> int:
    """Compare the model NEW, task by task, with an earlier one. The exit code is 1 if a task has changed or is missing.

    What each task uses is computed anew from the tensors of a model, whatever its file says about them.
    """
    found: int = _verify(new, against, trunk, method)
    return found
