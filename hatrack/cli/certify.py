"""`hatrack certify`: write the certificate of a model, or its bill of materials."""

from pathlib import Path

import click

from hatrack.cli.group import imported_when_called
from hatrack.cli.options import FOLDER, method_option, trunk_option

ENDINGS = {"certificate": ".certificate", "cyclonedx": ".cdx.json"}  # of the files, by format
_certify = imported_when_called("hatrack.cli.certificates:certify")


@click.command()
@click.argument("model", type=FOLDER)
@click.option(
    "--format",
    "kind",
    type=click.Choice(list(ENDINGS)),
    default="certificate",
    help="the certificate that hatrack verify compares; cyclonedx: a bill of materials, CycloneDX 1.6 [certificate]",
)
@click.option(
    "--out",
    "-o",
    type=FOLDER,
    metavar="FILE",
    help="the file to write (default: MODEL with the ending .certificate or .cdx.json; both are JSON)",
)
@trunk_option
@method_option
def command(model: Path, kind: str, out: Path | None, trunk: str, method: str) -> None:
    """Write the certificate of the saved MODEL: per finished task the digest of all that it uses, and its answers.

    Or write its bill of materials, with its data sets and libraries; a record beside MODEL tells more about it.
    """
    _certify(model, kind, out or model.with_suffix(ENDINGS[kind]), trunk, method)
