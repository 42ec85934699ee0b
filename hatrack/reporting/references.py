"""The two references of the forgetting ratio, and which rows of their matrices count: joint training may skip lengths."""

import math
from collections.abc import Iterable

import numpy as np

from hatrack.experiments import metrics
from hatrack.experiments.metrics import Matrix
from hatrack.experiments.record import Record
from hatrack.experiments.records import untuned

REFERENCES = ("joint", "random")  # the upper and the lower reference of the forgetting ratio; they are not ranked
OF_THE_LAST_ROW = (
    "accuracy",
    "without_task_id",
    "routed",
)  # measures of a record that need only what was measured at the end


def lengths(record: Record) -> list[int]:
    """Return the numbers of tasks after which the accuracies of a record count.

    `joint` with the option `at` trains only after these numbers of tasks; its other rows are of no trained network.
    """
    every = range(1, len(record.tasks) + 1)
    at = record.spec.method_options.get("at") if record.spec.method == "joint" else None
    return [t for t in every if not at or t in at]


def complete(record: Record) -> bool:
    """Return whether all rows of a record's matrices count."""
    return len(lengths(record)) == len(record.tasks)


def counted_accuracy(record: Record) -> Matrix:
    """Return the accuracy matrix of a record, with nan in the rows that do not count."""
    accuracy = metrics.matrix(record.accuracy).copy()
    skipped = [t - 1 for t in range(1, len(accuracy) + 1) if t not in lengths(record)]
    accuracy[skipped] = math.nan
    return accuracy


def counted_summary(record: Record) -> dict[str, float]:
    """Return the measures of a record, with nan for those that need rows that do not count."""
    if complete(record):
        return record.summary
    known = OF_THE_LAST_ROW if len(record.tasks) in lengths(record) else ()
    return {key: value if key in known else math.nan for key, value in record.summary.items()}


def reference_records(records: Iterable[Record], method: str, seed: int) -> list[Record]:
    """Return the records of a reference at a seed, the complete ones first.

    They are all of one variant: of the method without options (but for `at`) if there is such a record, else of the first
    with others. Rows of variants are never mixed.
    """
    found = [record for record in records if record.spec.method == method and record.spec.seed == seed]
    first = min(map(_variant, found), default=())
    return sorted((r for r in found if _variant(r) == first), key=lambda r: (not complete(r), r.name))


def _variant(record: Record) -> tuple[str, ...]:
    """Return the options of a reference that make it another one, as texts in order; empty if there are none. Options of
    the regime that were tuned count as well."""
    options = {name: value for name, value in record.spec.method_options.items() if name != "at"}
    options |= {name: record.spec.regime.get(name) for name in untuned(record)}
    return tuple(sorted(f"{name}={value!r}" for name, value in options.items()))


def reference_accuracy(records: Iterable[Record], method: str, seed: int) -> Matrix | None:
    """Return the accuracy matrix of a reference at a seed.

    Args:
        records: the records of a setting.
        method: "joint" or "random".
        seed: the seed.

    Returns:
        The matrix of the complete record if there is one, else rows from several records, with nan in those that no record
        has; None if there is no record.
    """
    matrices = [counted_accuracy(record) for record in reference_records(records, method, seed)]
    if not matrices:
        return None
    result = matrices[0]
    for other in matrices[1:]:
        empty = np.isnan(result).all(1)
        result[empty] = other[empty]
    return result
