"""A report: a page, figures and a table, made from the records in a folder and from nothing else."""

from pathlib import Path

from hatrack.experiments.records import records
from hatrack.files.atomic import writable, write
from hatrack.reporting.budget import parse_budget, within_budget
from hatrack.reporting.by_task import by_task_csv
from hatrack.reporting.drawing import line_styles, slugs
from hatrack.reporting.figures import draw
from hatrack.reporting.page import page
from hatrack.reporting.tables import csv_text, settings


def report(folder: Path | str, out: Path | str | None = None, *, budget: str | None = None, budget_of: str = "sgd") -> Path:
    """Write report.html, table.csv, by_task.csv and figures/*.png for the records in a folder.

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
    limits = parse_budget(budget, budget_of) if budget else None
    found = [within_budget(one, limits) if limits else one for one in settings(records(folder))]
    target = writable(Path(out or folder))
    styles = line_styles(found)
    names = slugs([setting.spec.benchmark for setting in found])
    drawings = [draw(setting, name, styles) for setting, name in zip(found, names, strict=True)]
    figures = writable(target / "figures")
    for drawing in (d for group in drawings for d in group):
        write(figures / f"{drawing.name}.png", drawing.png)
    write(target / "table.csv", csv_text(found))
    write(target / "by_task.csv", by_task_csv(found))
    write(target / "report.html", page(found, drawings, styles))
    return target / "report.html"
