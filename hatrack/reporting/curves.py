"""Accuracies on every task after each epoch, in the order of a run's fits, and their mean over seeds."""

from typing import NamedTuple

import numpy as np

from hatrack.experiments.metrics import Matrix
from hatrack.experiments.record import Record


class Watched(NamedTuple):
    """The accuracy on every task after each epoch.

    Attributes:
        accuracy: (epochs of all fits, tasks).
        starts: the tasks that have fits, each with the number of its first epoch in `accuracy`.
    """

    accuracy: Matrix
    starts: dict[int, int]


def watched(record: Record) -> Watched | None:
    """Return the accuracies of a record in the order of its fits; None if it has none."""
    rows: list[list[float]] = []
    starts: dict[int, int] = {}
    for curve in record.curves:
        starts.setdefault(curve.task, len(rows))
        rows += curve.watched
    return Watched(np.array(rows, dtype=np.float64), starts) if rows else None


def mean_watched(records: list[Record]) -> tuple[Watched, str] | None:
    """Return the accuracies averaged over seeds, or those of the first seed if the seeds took different numbers of epochs.

    Returns:
        The accuracies, and which seed they are of as the end of a label; None if no record has any.
    """
    found = [(record, value) for record in records if (value := watched(record))]
    if not found:
        return None
    record, first = found[0]
    if all(value.accuracy.shape == first.accuracy.shape and value.starts == first.starts for _, value in found):
        return Watched(np.mean([value.accuracy for _, value in found], axis=0), first.starts), ""
    return first, f", seed {record.spec.seed}"
