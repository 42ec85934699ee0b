"""A report: a page, figures and a table, made from the records in a folder and from nothing else."""

from pathlib import Path

from hatrack.experiments.record import Record
from hatrack.files.atomic import writable, write
from hatrack.reporting.drawing import looks, slugs
from hatrack.reporting.figures import draw
from hatrack.reporting.page import page
from hatrack.reporting.tables import csv_text, settings

__all__ = ["read", "report"]


def report(folder: Path, out: Path | None = None) -> Path:
    """Write report.html, table.csv and figures/*.png for the records in a folder; returns the page's path.

    The same records give the same bytes, so a report can be made again anywhere.
    """
    found = settings(read(Path(folder)))
    target = writable(Path(out or folder))
    seen = looks(found)
    names = slugs([setting.spec["benchmark"] for setting in found])
    drawings = [draw(setting, name, seen) for setting, name in zip(found, names, strict=True)]
    figures = writable(target / "figures")
    for drawing in (d for group in drawings for d in group):
        write(figures / f"{drawing.name}.png", drawing.png)
    write(target / "table.csv", csv_text(found))
    write(target / "report.html", page(found, drawings, seen))
    return target / "report.html"


def read(folder: Path) -> list[Record]:
    """All records in a folder; an error in one line for a file that is none."""
    if not folder.is_dir():
        raise ValueError(f"no folder {str(folder)!r}; `hatrack run BENCHMARK METHOD --out {folder}` would make one")
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise ValueError(f"no records in {folder}; `hatrack run BENCHMARK METHOD --out {folder}` would put one there")
    return [Record.load(path) for path in paths]
