"""What a run would cost, by the times in the records of similar runs."""

import heapq
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any, NamedTuple

from hatrack.experiments.record import Record
from hatrack.experiments.spec import Run

SIZE = (  # the keys of a spec that two runs of one size share
    "benchmark", "benchmark_options", "network", "network_options", "first_tasks", "only_task",
)  # fmt: skip
IMAGES = ("data", "valid")  # options of benchmarks by which a task has more or fewer images
SHARED_OUT = ("smnist",)  # benchmarks whose tasks share out the same images, however many they are


class Cost(NamedTuple):
    """The expected time of a run.

    Attributes:
        seconds: the mean of similar runs, per epoch of a task, times the epochs at most and the tasks; None: none.
        similar: whose times these are; lengths are numbers of tasks.
    """

    seconds: float | None
    similar: str


def expected_cost(run: Run, records: Iterable[Record]) -> Cost:
    """Return what a run would cost.

    Args:
        run: the run.
        records: any records; those of its own method in the same setting are preferred. Where some were made on a GPU and
            some on a CPU, the times are those of the GPU if there is a similar run of it.
    """
    timed = [record for record in records if record.seconds.total]
    on_gpu = _cost(run, [record for record in timed if record.versions.get("device") != "cpu"])
    return on_gpu if on_gpu.seconds is not None else _cost(run, timed)


def _cost(run: Run, timed: list[Record]) -> Cost:
    """Return what a run would cost, by the records that are most like it."""
    spec = run.spec
    same = [r for r in timed if r.spec.written == {**spec, "seed": r.spec.seed}]
    size = [r for r in timed if all(r.spec.written.get(key) == spec.get(key) for key in SIZE)]
    alike = [r for r in size if r.spec.method == run.method]
    near = [r for r in size if _trains(r.spec.method, run.method)]
    longer = [r for r in timed if _size_of_a_task(r.spec.written) == _size_of_a_task(spec)]
    own = [r for r in longer if r.spec.method == run.method]
    others = [r for r in longer if _trains(r.spec.method, run.method)]
    kinds = (
        ("its other seeds", same),
        ("its other settings", alike),
        ("its other lengths", own),
        ("other methods", near),
        ("other methods, lengths", others),
    )
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


def _trains(*methods: str) -> bool:
    """Return whether these methods train something."""
    return "random" not in methods


def _size_of_a_task(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the time of a task follows from, whatever the number of tasks and what distinguishes them."""
    options = spec.get("benchmark_options") or {}
    return {
        **{key: spec.get(key) for key in ("benchmark", "network", "network_options", "only_task")},
        **{key: options.get(key) for key in IMAGES},
    }


def _seconds(record: Record, run: Run) -> float:
    """Return the time of a record, as if it had as many tasks, and epochs at most or steps, as the run."""
    unit = "steps" if run.regime.steps and record.spec.regime.get("steps") else "epochs"
    wanted = float(getattr(run.regime, unit))
    factor = wanted / float(record.spec.regime.get(unit) or wanted)
    there = len(record.tasks)
    tasks = run.first_tasks or run.benchmark_options.get("tasks") or there
    factor *= _passes(run.method, run.method_options, tasks, run.benchmark)
    factor /= _passes(record.spec.method, record.spec.method_options, there, run.benchmark)
    return (record.seconds.total or 0.0) * factor


def _passes(method: str, options: Mapping[str, Any], tasks: int, benchmark: str) -> float:
    """Return how many times a run goes over the images of a task, in each of its epochs: joint training begins anew after
    each task, or after those that it is told, with all tasks so far."""
    passes = sum(options.get("at") or range(1, tasks + 1)) if method == "joint" else tasks
    return passes / tasks if benchmark in SHARED_OUT else passes
