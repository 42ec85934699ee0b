"""What ten seeds of Table 1 of HAT (001) take by measured rates: python -m speed.table_1 [--rates 5007,7019]

The steps of an approach on the eight data sets are counted in its records. One that has none there is taken to need as many
steps for one of HAT's as on `cifar`, or as with our defaults there. A step of each is taken to cost what one of HAT costs,
and every run to share the GPU with as many others as when the rate was measured.
"""

import argparse
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from hatrack.experiments.record import Record
from hatrack.recipes.hat_2018 import MIXTURE_OPEN
from hatrack.recipes.hat_approaches import APPROACHES
from hatrack.recipes.hat_cifar import CIFAR
from hatrack.recipes.reproduce import read_records
from hatrack.recipes.results import Records, Results
from hatrack.tasks.batches import count_batches

SEEDS, TASKS, BATCH = 10, 8, 64
JOINT = "joint, all tasks"
SIDE_BY_SIDE, STACKED, GOAL = 5007, 7019, 10_000  # steps per second with bfloat16: docs/results/speed.md


class Line(NamedTuple):
    """What ten seeds of an approach need on the eight sets: steps for one of HAT's, counted on which benchmark in how many
    records, and steps in all."""

    label: str
    relative: float
    benchmark: str
    records: int
    steps: float


def count_steps(record: Record) -> int:
    """Return the steps of a run. Joint training takes the batches of all tasks up to the one that it fits after."""
    joint, batch, total = record.spec.method == "joint", int(record.spec.regime["batch"]), 0
    for curve in record.curves:
        tasks = record.tasks[0 if joint else curve.task : curve.task + 1]
        total += len(curve.epochs) * count_batches(sum(task.train for task in tasks), batch)
    return total


def estimate(records: Records, eight: Results) -> list[Line]:
    """Return a line for every approach, and one for joint training.

    Args:
        records: all records.
        eight: those of Table 1.
    """
    cifar = Results(CIFAR, records)
    own = _mean(eight, "HAT")
    lines = []
    for label in (approach.label for approach in APPROACHES):
        known = label if cifar.records(label) else f"{label}, our defaults"
        relative, *where = _relative(eight, label) if eight.records(label) else _relative(cifar, known)
        lines.append(Line(label, relative, *where, SEEDS * own * relative))
    whole = _whole_fit(eight) if eight.records(JOINT) else own * _mean(cifar, JOINT) / _mean(cifar, "HAT")
    source = eight if eight.records(JOINT) else cifar
    # One seed has a fit after each task, the others after two and eight.
    fits = sum(range(1, TASKS + 1)) + (SEEDS - 1) * (2 + TASKS)
    joint = Line("joint", whole / own, source.part.name, len(source.records(JOINT)), whole * fits / TASKS)
    return [*lines, joint]


def _relative(results: Results, label: str) -> tuple[float, str, int]:
    """Return the steps of an approach for one of HAT, on which benchmark, and in how many records they are counted."""
    return _mean(results, label) / _mean(results, "HAT"), results.part.name, len(results.records(label))


def _whole_fit(eight: Results) -> float:
    """Return the steps of joint training on all tasks, of runs that have a fit on two tasks as well."""
    return fmean(
        len(r.curves[-1].epochs) * count_batches(sum(t.train for t in r.tasks), BATCH) for r in eight.records(JOINT)
    )


def _mean(results: Results, label: str) -> float:
    return fmean(count_steps(record) for record in results.records(label))


def table(lines: list[Line], rates: list[float]) -> str:
    """Return a Markdown table of steps and of the minutes at each rate."""
    head = ["", "steps for one of HAT", "counted on", "n", "million steps", *(f"minutes at {rate:,.0f}/s" for rate in rates)]
    rows = [head, ["---"] * len(head)]
    total = sum(line.steps for line in lines)
    for line in [*lines, Line("all", 0, "", 0, total)]:
        known = [f"{line.relative:.2f}", f"`{line.benchmark}`", str(line.records)] if line.records else ["", "", ""]
        rows.append([line.label, *known, f"{line.steps / 1e6:.1f}", *(f"{line.steps / rate / 60:.0f}" for rate in rates)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=Path, default=Path("docs/results"), help="the folder whose records are read")
    parser.add_argument("--rates", default=f"{SIDE_BY_SIDE},{STACKED},{GOAL}", help="steps per second of all runs together")
    given = parser.parse_args(arguments)
    records = read_records(given.records)
    print(table(estimate(records, Results(MIXTURE_OPEN, records)), [float(rate) for rate in given.rates.split(",")]))


if __name__ == "__main__":
    main()
