"""Measures after every number of tasks, and by position in the sequence, as values and as CSV."""

import csv
import io
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from hatrack.experiments import metrics
from hatrack.experiments.metrics import Matrix
from hatrack.experiments.record import Record
from hatrack.reporting.measures import MeanStd, mean_std, spreadsheet_text
from hatrack.reporting.references import counted_accuracy
from hatrack.reporting.tables import Setting, ranking, ratios

Values = list[MeanStd | None]  # one per task, over seeds; None where no seed has a finite value


class ByTask(NamedTuple):
    """One method of a setting. All lists have an entry per task.

    Attributes:
        label: the method.
        seeds: how many seeds it has.
        reference: whether it is a reference.
        average_accuracy: entry t - 1 is the mean accuracy over the first t tasks after t tasks.
        forgetting_ratio: entry t - 1 is the forgetting ratio after t tasks.
        when_learned: entry k - 1 is the accuracy on the task learned k-th, right after it was learned.
        at_the_end: entry k - 1 is the accuracy on the task learned k-th, after all tasks.
    """

    label: str
    seeds: int
    reference: bool
    average_accuracy: Values
    forgetting_ratio: Values
    when_learned: Values
    at_the_end: Values


MEASURED = ("average_accuracy", "forgetting_ratio", "when_learned", "at_the_end")


def by_task(setting: Setting) -> list[ByTask]:
    """Return the measures of every method after every number of tasks, in the order of the ranking."""
    found: list[ByTask] | None = setting.kept.get("by_task")
    if found is None:
        found = [
            ByTask(row.label, len(row.seeds), row.reference, *_measured(setting, setting.methods[row.label]))
            for row in ranking(setting)
        ]
        setting.kept["by_task"] = found
    return found


def _measured(setting: Setting, records: list[Record]) -> list[Values]:
    """Return the values of MEASURED for the records of one method."""
    matrices = [counted_accuracy(record) for record in records]
    none = np.full(len(setting.tasks), np.nan)
    found = [ratios(setting, record) for record in records]
    return [
        _over_seeds([metrics.average_accuracies(accuracy) for accuracy in matrices]),
        _over_seeds([none if ratio is None else ratio for ratio in found]),
        _over_seeds([np.diag(accuracy) for accuracy in matrices]),
        _over_seeds([accuracy[-1] for accuracy in matrices]),
    ]


def _over_seeds(lines: list[Matrix]) -> Values:
    """Return mean and standard deviation of every column of lines, one line per seed."""
    return [mean_std(column.tolist()) for column in np.stack(lines, axis=1)]


def by_task_csv(settings: Iterable[Setting]) -> str:
    """Return the measures after every number of tasks as CSV in long form: a row per setting, method and number of tasks.

    Every measure has its mean, its standard deviation and its number of seeds; a missing value is an empty cell.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns = [f"{name}{end}" for name in MEASURED for end in ("", "_std", "_n")]
    writer.writerow(["setting", "method", "reference", "tasks", *columns])
    for setting in settings:
        for row in by_task(setting):
            names = (spreadsheet_text(setting.title), spreadsheet_text(row.label), "yes" if row.reference else "no")
            for number, values in enumerate(zip(*(getattr(row, name) for name in MEASURED), strict=True), start=1):
                writer.writerow([*names, number, *(cell for value in values for cell in value or (None, None, 0))])
    return out.getvalue()
