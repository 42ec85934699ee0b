"""Carrying out `hatrack table`. Imported when it begins: it needs numpy and scipy."""

from pathlib import Path

from hatrack.experiments.records import records
from hatrack.files.atomic import write
from hatrack.reporting.export import Format, export
from hatrack.reporting.tables import settings
from hatrack.text import say


def table(folder: Path, form: Format, out: Path | None) -> None:
    """Print or write the tables of the records in a folder."""
    text = export(settings(records(folder)), form)
    if out is None:
        for line in text.splitlines():
            say(line)
    else:
        write(out, text)
        say(f"wrote {out}")
