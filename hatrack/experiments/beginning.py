"""The beginning of a run: what a run of its first tasks alone would have left, taken from its record.

Learning a task depends on the tasks before it, never on those that come later. So the first rows and columns of the matrices
of a run are those of a shorter run, bit for bit, if the network does not depend on the number of tasks (as the columns of
`pnn --columns budget` do); to rounding, if steps were compiled and a later task has more classes than all of these.
"""

import math
from dataclasses import replace
from typing import TypeVar

from hatrack.experiments.record import Record, name_of
from hatrack.experiments.record_parts import Seconds

Entry = TypeVar("Entry", float, float | None)


def beginning(record: Record, tasks: int) -> Record:
    """Return the record of the first tasks of a run.

    Args:
        record: the record of a run.
        tasks: how many of its tasks.

    Returns:
        A record with the name and spec of the run of these tasks alone. What is measured once, at the end of a run, is not
        known: accuracies without a task id and with a router, weights in use, costs. `parameters` are those of the whole.
    """
    if not 1 <= tasks <= len(record.tasks):
        raise ValueError(f"{record.name} has {len(record.tasks)} tasks, so that it has no first {tasks}")
    if tasks == len(record.tasks):
        return record
    spec = record.spec.replace(first_tasks=tasks)
    return replace(
        record,
        name=name_of(spec.written),
        spec=spec,
        tasks=record.tasks[:tasks],
        before=record.before[:tasks],
        accuracy=_cut(record.accuracy, tasks),
        loss=_cut(record.loss, tasks),
        train_loss=_cut(record.train_loss, tasks),
        valid_accuracy=_cut(record.valid_accuracy, tasks),
        valid_loss=_cut(record.valid_loss, tasks),
        curves=[replace(curve, watched=_columns(curve.watched, tasks)) for curve in record.curves if curve.task < tasks],
        usage=record.usage[:tasks],
        seconds=Seconds(learn=(record.seconds.learn or [])[:tasks] or None),
        without_task_id=[math.nan] * tasks,
        costs=None,
        weights_used={},
        routed=None,
        models={},
    )


def _cut(matrix: list[list[Entry]], tasks: int) -> list[list[Entry]]:
    """Return the first rows of a matrix, cut to the first tasks."""
    return _columns(matrix[:tasks], tasks)


def _columns(rows: list[list[Entry]], tasks: int) -> list[list[Entry]]:
    """Return rows of values on all tasks, cut to the first tasks."""
    return [row[:tasks] for row in rows]
