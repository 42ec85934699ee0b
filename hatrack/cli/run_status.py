"""Carrying out `hatrack status`. Imported when it begins."""

import time
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hatrack.clusters.status import STATES, RunStatus, status, summary, write_page
from hatrack.files.atomic import check_folder
from hatrack.text import printable, say

OPEN = ("running", "queued", "waiting")


def show(folder: Path, page: bool, watch: float | None, everything: bool) -> None:
    """Print where the runs of a folder stand.

    Args:
        folder: the folder of the records.
        page: write status.html as well.
        watch: seconds after which to do it again, until no run is under way; None for once.
        everything: list the runs that are done, too.
    """
    check_folder(folder)
    if watch is not None and not watch > 0:
        raise ValueError(f"--watch must be a number of seconds above 0, not {watch:g}")
    while True:
        found = status(folder)
        _print([run for run in found if everything or run.state != "done"])
        say(f"{folder}: {summary(found)}")
        if page:
            say(f"the page: {write_page(folder)}")
        if watch is None or not any(run.state in OPEN for run in found):
            return
        time.sleep(watch)


def _print(found: Sequence[RunStatus]) -> None:
    if not found:
        return
    table = Table("run", "state", "done", "", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for run in sorted(found, key=lambda run: (list(STATES).index(run.state), run.name)):
        share = "" if run.share is None else f"{run.share:.0%}"
        table.add_row(Text(printable(run.name)), run.state, share, Text(printable(run.text)))
    Console().print(table)
