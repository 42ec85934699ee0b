"""Further tables of recipes: forgetting ratios after every number of tasks, accuracy by position, losses of old tasks."""

import math
from collections.abc import Callable

import numpy as np

from hatrack.experiments.metrics import Matrix
from hatrack.inspection.flatness import CORRELATIONS, correlations
from hatrack.recipes.quantities import Quantity
from hatrack.recipes.recipe import Grid, Published
from hatrack.recipes.results import Results
from hatrack.reporting.measures import MISSING, MeanStd, Measure, format_number, format_std, mean_std

RATIO = Measure("", "", "ratio", "")
PERCENT = Measure("", "", "%", "")


def cell(measure: Measure, value: MeanStd | None, seeds: int = 0) -> str:
    """Return a mean with its standard deviation as text, and the number of seeds where it is not `seeds`."""
    if value is None:
        return MISSING
    count = f" (n = {value.seeds})" if seeds and value.seeds != seeds else ""
    return f"{format_number(measure, value.mean)} {format_std(measure, value)}".strip() + count


def ratio_by_tasks(results: Results) -> Grid | None:
    """Return the forgetting ratio of every row after every number of tasks that one of them has it for."""
    lines = {label: found for label, row in results.rows.items() if not row.reference and (found := results.ratios(label))}
    if not lines:
        return None
    known = sorted({t for found in lines.values() for line in found for t in np.flatnonzero(~np.isnan(line))})
    rows = []
    for label, found in lines.items():
        values = [[line[t] for line in found if t < len(line)] for t in known]
        rows.append([label, str(len(found)), *(cell(RATIO, mean_std(column), len(found)) for column in values)])
    heads = ["approach", "n", *(f"t = {t + 1}" for t in known)]
    return Grid("Forgetting ratio after every number of tasks", heads, rows)


def flatness_correlations(results: Results) -> Grid | None:
    """Return how forgetting goes together with curvature and distance, over all runs whose flatness was measured."""
    found = correlations([one for label in results.rows for one in results.flatness_of(label)])
    if not found["eigenvalue"].pairs:
        return None
    return Grid("Correlations", ["of", "over all runs"], [[CORRELATIONS[key], str(one)] for key, one in found.items()])


def accuracy_by_position(label: str) -> Callable[[Results], Grid | None]:
    """Return a table of the accuracy at the end on every data set, by its position in the sequence."""

    def grid(results: Results) -> Grid | None:
        cells: dict[str, dict[int, list[float]]] = {}
        for record in results.records(label):
            for position, (task, accuracy) in enumerate(zip(record.tasks, record.accuracy[-1], strict=True)):
                cells.setdefault(task.name, {}).setdefault(position, []).append(accuracy)
        if not cells:
            return None
        count = 1 + max(position for row in cells.values() for position in row)
        rows = [[name, *(_mean(row.get(k, [])) for k in range(count))] for name, row in sorted(cells.items())]
        every = [[v for row in cells.values() for v in row.get(k, [])] for k in range(count)]
        rows.append(["all", *map(_mean, every)])
        title = f"{label}: accuracy in % at the end, by the position of a data set in the sequence"
        return Grid(title, ["data set", *(f"{k + 1}." for k in range(count))], rows)

    return grid


def _mean(values: list[float]) -> str:
    return format_number(PERCENT, float(np.mean(values))) if values else MISSING


def loss_matrix(label: str) -> Callable[[Results], Grid | None]:
    """Return the test loss of every task after each task, at the first seed of a row (000)."""

    def grid(results: Results) -> Grid | None:
        records = results.records(label)
        if not records:
            return None
        record, tasks = records[0], range(len(records[0].tasks))
        rows = [[f"{t + 1}", *(_loss(record.loss[t][i]) if i <= t else "" for i in tasks)] for t in tasks]
        title = f"{label}: test loss of every task (columns) after each task (rows), seed {record.spec.seed}"
        return Grid(title, ["after", *(f"task {i + 1}" for i in tasks)], rows)

    return grid


def _loss(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "not finite"
    return f"{value:.3g}"


def compared(
    title: str, lines: Callable[[Results], list[tuple[str, float | None, Published]]], measure: Measure
) -> Callable[[Results], Grid | None]:
    """Return a table of numbers that follow from several rows, each beside the published one, without a verdict.

    Args:
        title: of the table.
        lines: the name, our value (None: a row is missing, or it means nothing) and the published value of each line.
        measure: how values are written.
    """

    def grid(results: Results) -> Grid:
        found = [
            (name, cell(measure, None if ours is None else MeanStd(ours, None, 1)), p) for name, ours, p in lines(results)
        ]
        return Grid(title, ["", "published", "ours"], [[n, format_number(measure, p.mean), ours] for n, ours, p in found])

    return grid


def learning_gaps(results: Results, first: str, second: str) -> Matrix:
    """Return by how much more accurate one row is than another on every task immediately after it was learned: a line per
    seed that both have, (seeds, tasks)."""
    found, others = results.by_seed[first], results.by_seed[second]
    own = {
        seed: [np.diag(np.array(records[seed].accuracy)) for records in (found, others)] for seed in found.keys() & others
    }
    return np.array([a - b for _, (a, b) in sorted(own.items())])


def difference_by_task(title: str, pairs: list[tuple[str, str, str]]) -> Callable[[Results], Grid | None]:
    """Return a table of the differences between two rows on every task immediately after it was learned, in points.

    Args:
        title: of the table.
        pairs: a name, and the labels of the row that is subtracted from, and of the other.
    """

    def grid(results: Results) -> Grid | None:
        found = {name: gaps for name, a, b in pairs if len(gaps := learning_gaps(results, a, b))}
        if not found:
            return None
        tasks = max(gaps.shape[1] for gaps in found.values())
        rows = [
            [name, str(len(gaps)), *(cell(PERCENT, mean_std(list(column))) for column in (*gaps.T, gaps.mean(1)))]
            for name, gaps in found.items()
        ]
        return Grid(title, ["", "n", *(f"task {t + 1}" for t in range(tasks)), "mean"], rows)

    return grid


def difference(title: str, pairs: list[tuple[str, str, str]], quantity: Quantity) -> Callable[[Results], Grid | None]:
    """Return a table of the differences between two rows, seed by seed.

    Args:
        title: of the table.
        pairs: a name, and the labels of the row that is subtracted from, and of the other.
        quantity: what is compared.
    """

    def grid(results: Results) -> Grid:
        rows = []
        for name, first, second in pairs:
            a, b = ({r.spec.seed: r for r in results.records(label)} for label in (first, second))
            both = [
                quantity.value(a[seed], results.references(first, seed))
                - quantity.value(b[seed], results.references(second, seed))
                for seed in sorted(a.keys() & b.keys())
            ]
            rows.append([name, str(len(both)), cell(quantity.measure, mean_std(both))])
        return Grid(title, ["", "n", quantity.measure.title], rows)

    return grid
