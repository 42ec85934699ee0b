"""`hatrack report`: a page and tables of the records in a folder."""

from pathlib import Path

import click

from hatrack.cli.group import imported_when_called
from hatrack.cli.options import BUDGET, BUDGET_OF, FOLDER
from hatrack.files.atomic import check_folder
from hatrack.text import say

_read = imported_when_called("hatrack.reporting.report:read_settings")
_write = imported_when_called("hatrack.reporting.report:write_report")


@click.command()
@click.argument("folder", type=FOLDER)
@click.option("--out", type=FOLDER, metavar="FOLDER", help="where to write the page (default: the same folder)")
@BUDGET
@BUDGET_OF
def command(folder: Path, out: Path | None, budget: str | None, budget_of: str) -> None:
    """Make a page and tables of the records in FOLDER."""
    check_folder(folder, f"hatrack run ... --out {folder} would make one")
    found = _read(folder, budget, budget_of)
    count = sum(len(records) for setting in found for records in setting.methods.values())
    say(f"{count} record{'s' * (count != 1)} read in {folder}; making the page")
    page = _write(found, folder, out or folder)
    say(f"wrote {page} ({page.stat().st_size / 1e6:.1f} MB), table.csv and by_task.csv")
