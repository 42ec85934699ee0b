"""Carrying out `hatrack table`. Imported when it begins: it needs numpy and scipy."""

import sys
from pathlib import Path

from hatrack.experiments.records import records
from hatrack.files.atomic import write
from hatrack.reporting.budget import limits_of, within_budget
from hatrack.reporting.export import Format, export
from hatrack.reporting.tables import settings
from hatrack.text import say


def table(folder: Path, form: Format, out: Path | None, budget: str | None, budget_of: str) -> None:
    """Print or write the tables of the records in a folder. Methods outside the budget are named on standard error."""
    limits = limits_of(budget, budget_of)
    found = [within_budget(one, limits) if limits else one for one in settings(records(folder))]
    for line in (line for one in found for line in one.left_out):
        say(line, sys.stderr)
    text = export(found, form)
    if out is None:
        for line in text.splitlines():
            say(line)
    else:
        write(out, text)
        say(f"wrote {out}")
