"""`hatrack export`: the network of one task of a saved model as a file that needs nothing of this package."""

from pathlib import Path

import click

from hatrack.cli.group import imported_when_called
from hatrack.cli.options import FOLDER, method_option, trunk_option

FORMATS = {"onnx": ".onnx", "torch": ".pt2", "safetensors": ".safetensors"}  # and the endings of their files
_export = imported_when_called("hatrack.cli.exporting:export")


@click.command()
@click.argument("model", type=FOLDER)
@click.option("--task", metavar="NAME", required=True, help="the name of a task that the model has learned, or its number")
@click.option(
    "--format",
    "kind",
    type=click.Choice(list(FORMATS)),
    default="torch",
    help="onnx (the extra hatrack[onnx]); torch, which torch.export.load reads; safetensors, the tensors alone [torch]",
)
@click.option("--out", type=FOLDER, metavar="FILE", help="the file to write (default: MODEL-TASK with the format's ending)")
@click.option("--floats", is_flag=True, help="raw images are floats in the units of the task's data, not bytes (uint8)")
@trunk_option
@method_option
def command(model: Path, task: str, kind: str, out: Path | None, trunk: str, method: str, floats: bool) -> None:
    """Write the network of one task of the saved MODEL, cut to what the task uses, from raw images to logits."""
    _export(model, task, kind, out, trunk, method, floats)
