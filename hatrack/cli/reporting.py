"""Making a report from the command line, and saying meanwhile what is done. Imported when it begins."""

import time
from pathlib import Path

from rich.console import Console

from hatrack.reporting.report import report
from hatrack.text import duration, say


def make_report(folder: Path, out: Path | None, *, budget: str | None, budget_of: str) -> None:
    """Make the report of a folder; a terminal shows what is done while it is made.

    Args:
        folder: the folder of the records.
        out: where the page goes; None for the same folder.
        budget: leave out methods that cost more, see `report`.
        budget_of: the method that sets the budget.
    """
    count = sum(1 for _ in folder.glob("*.json"))
    what = f"{count:,} {'record' if count == 1 else 'records'}"
    began = time.monotonic()
    with Console(stderr=True).status(f"reading {what} and making the page"):
        path = report(folder, out, budget=budget, budget_of=budget_of)
    say(f"wrote {path}, the page of {what}, in {duration(time.monotonic() - began)}")
