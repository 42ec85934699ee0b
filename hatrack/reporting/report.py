"""A report: a page and tables, made from the records in a folder and from nothing else."""

import os
from pathlib import Path
from urllib.parse import quote

from hatrack.experiments.records import records
from hatrack.files.atomic import writable, write
from hatrack.reporting.budget import limits_of, within_budget
from hatrack.reporting.by_task import by_task_csv
from hatrack.reporting.collect import collect_settings
from hatrack.reporting.page import render_page
from hatrack.reporting.tables import Setting, csv_text, settings


def report(folder: Path | str, out: Path | str | None = None, *, budget: str | None = None, budget_of: str = "sgd") -> Path:
    """Write report.html, table.csv and by_task.csv for the records in a folder.

    The same records give the same bytes, so that a report can be made again on any machine.

    Args:
        folder: the folder of the records, the `out` of `hatrack.run`.
        out: the folder for the report; it is created if needed. The default is `folder`.
        budget: leave out methods that cost more than so many times what `budget_of` costs, such as "bytes=1.5x,steps=2x".
        budget_of: the method whose costs are the measure of the budget.

    Returns:
        The path of report.html.

    Raises:
        ValueError: there are no records in the folder, one of its JSON files is not a record, or two records of the same
            run have different results; or the budget can't be applied.

    Example:
        >>> import hatrack as hr
        >>> spec = hr.Run("smnist", "hat", benchmark_options={"data": "sample"}, regime=hr.Regime(epochs=2))
        >>> hr.run(spec, "records")
        >>> hr.report("records")
        PosixPath('records/report.html')
    """
    return write_report(read_settings(Path(folder), budget, budget_of), Path(folder), Path(out or folder))


def read_settings(folder: Path, budget: str | None = None, budget_of: str = "sgd") -> list[Setting]:
    """Read the records of a folder and group them into settings; the arguments are those of `report`."""
    limits = limits_of(budget, budget_of)
    return [within_budget(one, limits) if limits else one for one in settings(records(folder))]


def write_report(found: list[Setting], folder: Path, target: Path) -> Path:
    """Write the page and the tables of settings into the folder `target`, and return the path of the page."""
    writable(target)
    write(target / "table.csv", csv_text(found))
    write(target / "by_task.csv", by_task_csv(found))
    write(
        target / "report.html", render_page(collect_settings(found, running=unfinished(folder), link=_link(folder, target)))
    )
    return target / "report.html"


def _link(folder: Path, target: Path) -> str:
    """Return what leads from the page to the records."""
    path = os.path.relpath(folder, target).replace(os.sep, "/")
    return "" if path == "." else f"{quote(path)}/"


def unfinished(folder: Path) -> list[dict[str, str]]:
    """Return the runs of a folder that have saved states but no record yet: they were stopped, or go on."""
    found = sorted(path.stem for path in folder.glob("*.part") if path.is_dir() and not path.with_suffix(".json").exists())
    return [
        {"name": name, "status": "stopped", "message": f"or still running; hatrack resume {folder.name} goes on with it"}
        for name in found
    ]
