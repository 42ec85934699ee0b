"""Two tables of the page: the forgetting ratio after every number of tasks, and the accuracy by position in the sequence."""

from collections.abc import Sequence

from hatrack.reporting.by_task import ByTask, Values, by_task
from hatrack.reporting.drawing import LineStyle
from hatrack.reporting.elements import cell, coloured_label, table
from hatrack.reporting.figures import shown_tasks
from hatrack.reporting.measures import Measure, measure_of
from hatrack.reporting.tables import Setting

RATIO = measure_of("accuracy", "forgetting_ratio")


def by_task_tables(setting: Setting, styles: dict[str, LineStyle]) -> str:
    """Return the tables of a setting, the ratio only if both references are there."""
    rows, shown = by_task(setting), shown_tasks(len(setting.tasks))
    ranked = [row for row in rows if not row.reference and any(row.forgetting_ratio)]
    return (_ratios(ranked, shown, styles) if ranked else "") + _positions(rows, shown, styles, setting.score)


def _ratios(rows: list[ByTask], shown: Sequence[int], styles: dict[str, LineStyle]) -> str:
    """Return the table of forgetting ratios: a row per method, a column per number of tasks."""
    body = [_line([coloured_label(row.label, styles)], RATIO, row.forgetting_ratio, row.seeds, shown) for row in rows]
    text = "The forgetting ratio after each number of tasks, mean ± standard deviation over seeds."
    return f"<p>{text}</p>" + table(_heads(["Method"], shown), ["<tbody>", *body, "</tbody>"], "ranking by-task")


def _positions(rows: list[ByTask], shown: Sequence[int], styles: dict[str, LineStyle], score: str) -> str:
    """Return the table of accuracies by position: two rows per method, a column per position in the sequence."""
    body, measure = [], measure_of(score, "accuracy")
    for row in rows:
        for when, values in (("learned", row.when_learned), ("at the end", row.at_the_end)):
            body.append(_line([coloured_label(row.label, styles), when], measure, values, row.seeds, shown))
    unit = ", in percent" if measure.unit == "%" else ""
    text = f"The {score} on the task that was learned first, second and so on{unit}: right after it was learned, and at "
    text += "the end. If later tasks are learned less well although nothing is forgotten, the network is getting full."
    return f"<p>{text}</p>" + table(_heads(["Method", "When"], shown), ["<tbody>", *body, "</tbody>"], "ranking by-task")


def _heads(names: Sequence[str], shown: Sequence[int]) -> list[str]:
    return [f'<th scope="col">{name}</th>' for name in (*names, *(k + 1 for k in shown))]


def _line(names: Sequence[str], measure: Measure, values: Values, seeds: int, shown: Sequence[int]) -> str:
    first, *others = names
    cells = "".join(f"<td>{text}</td>" for text in (*others, *(cell(measure, values[k], seeds) for k in shown)))
    return f'<tr><th scope="row">{first}</th>{cells}</tr>\n'
