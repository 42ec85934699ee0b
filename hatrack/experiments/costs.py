"""What a run would cost, by the times in the records of similar runs."""

import heapq
from collections.abc import Iterable
from statistics import fmean
from typing import NamedTuple

from hatrack.experiments.record import Record
from hatrack.experiments.spec import Run

SIZE = (  # the keys of a spec that two runs of one size share
    "benchmark", "benchmark_options", "network", "network_options", "first_tasks", "only_task",
)  # fmt: skip


class Cost(NamedTuple):
    """The expected time of a run.

    Attributes:
        seconds: the mean of similar runs, per epoch times the epochs at most; None if there are none.
        similar: whose times these are.
    """

    seconds: float | None
    similar: str


def expected_cost(run: Run, records: Iterable[Record]) -> Cost:
    """Return what a run would cost.

    Args:
        run: the run.
        records: any records; those of its own method in the same setting are preferred.
    """
    timed, spec = [record for record in records if record.seconds.total], run.spec
    same = [r for r in timed if r.spec.written == {**spec, "seed": r.spec.seed}]
    size = [r for r in timed if all(r.spec.written.get(key) == spec.get(key) for key in SIZE)]
    alike = [r for r in size if r.spec.method == run.method]
    near = [r for r in size if "random" not in (r.spec.method, run.method)]
    kinds = (("its other seeds", same), ("this method in other settings", alike), ("other methods on this network", near))
    for words, group in kinds:
        if group:
            return Cost(fmean(_seconds(record, run) for record in group), words)
    return Cost(None, "no similar run has a record")


def time_on(seconds: Iterable[float], places: int) -> float:
    """Return how long runs take beside each other: each begins as soon as a place is free, the longest first.

    This is at most 4/3 of the best that any order could do (Graham, 1969), and never less than the longest run.

    Args:
        seconds: what each run takes.
        places: how many runs at a time: the GPUs, times the runs that share one.
    """
    ends = [0.0] * places
    for length in sorted(seconds, reverse=True):
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def _seconds(record: Record, run: Run) -> float:
    """Return the time of a record, as if it had as many epochs at most, or steps, as the run."""
    unit = "steps" if run.regime.steps and record.spec.regime.get("steps") else "epochs"
    wanted = float(getattr(run.regime, unit))
    return (record.seconds.total or 0.0) * wanted / float(record.spec.regime.get(unit) or wanted)
