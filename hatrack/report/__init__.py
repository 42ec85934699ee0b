"""A report: a page, figures and a table, made from the records in a folder and from nothing else."""

import math
from pathlib import Path
from typing import Any

from hatrack.record import Record, write
from hatrack.report.drawing import looks, slugs
from hatrack.report.figures import draw
from hatrack.report.page import page
from hatrack.report.tables import csv_text, settings
from hatrack.run import writable

__all__ = ["read", "report"]

SPEC = {"benchmark": str, "method": str, "network": str, "seed": int, "regime": dict,
        "benchmark_options": dict, "network_options": dict, "method_options": dict}  # fmt: skip


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
    return [_load(path) for path in paths]


def _load(path: Path) -> Record:
    """A record whose parts are what a report reads; numbers that the file lacks become nan."""
    try:
        record = Record.load(path)
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from None
    for key, kind in SPEC.items():
        if not isinstance(record.spec.get(key), kind):
            raise ValueError(f"{path} is not a whole record: its spec has no {key}")
    if not all(_is_curve(curve, len(record.tasks)) for curve in record.curves):
        raise ValueError(f"{path} is not a whole record: its curves are not what they should be")
    if not isinstance(record.seconds.get("total", 0), int | float):
        raise ValueError(f"{path} is not a whole record: its seconds are no numbers")
    record.without_task_id = [math.nan if value is None else value for value in record.without_task_id]
    return record


def _is_curve(curve: Any, tasks: int) -> bool:
    if not isinstance(curve, dict) or not isinstance(curve.get("epochs"), list):
        return False
    epochs = curve["epochs"]
    places = curve.get("task") in range(tasks) and curve.get("best") in range(max(1, len(epochs)))
    return places and all(isinstance(epoch, dict) and "valid_accuracy" in epoch for epoch in epochs)
