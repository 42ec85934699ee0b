"""`hatrack certify`: write the certificate of a model."""

from pathlib import Path

import click

from hatrack.cli.group import imported_when_called
from hatrack.cli.options import FOLDER, method_option, trunk_option

_certify = imported_when_called("hatrack.cli.certificates:certify")


@click.command()
@click.argument("model", type=FOLDER)
@click.option(
    "--out", type=FOLDER, metavar="FILE", help="the file to write (default: MODEL with the ending .certificate; it is JSON)"
)
@trunk_option
@method_option
def command(model: Path, out: Path | None, trunk: str, method: str) -> None:
    """Write the certificate of the saved MODEL: per finished task the digest of all that it uses, and its answers."""
    _certify(model, out, trunk, method)
