"""Whether runs carried out in two ways have the same results but for noise: python -m speed.alike ONE TWO

ONE and TWO are folders with records of the same runs, such as one made with `--stack` and one without. By method:
accuracies, the mean difference of the same seeds with its interval of 95 %, the largest forgetting, and the steps per second
of all its runs together, if they ran side by side from beginning to end.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from hatrack import Record
from hatrack.experiments.metrics import average_accuracy, forgetting
from hatrack.experiments.statistics import t_interval

Pair = tuple[Record, Record]  # of the same run


@dataclass(frozen=True)
class Comparison:
    """Runs of a method on a benchmark, in two ways."""

    title: str
    pairs: Sequence[Pair]

    def accuracies(self, way: int) -> list[float]:
        """Return the average accuracies in percent, one per seed."""
        return [100 * average_accuracy(pair[way].accuracy) for pair in self.pairs]

    @property
    def differences(self) -> list[float]:
        """The accuracies in the first way minus those in the second, in points."""
        return [one - two for one, two in zip(self.accuracies(0), self.accuracies(1), strict=True)]

    @property
    def alike(self) -> bool:
        """Whether a mean difference of 0 is within the interval, or all differences are 0."""
        if not any(self.differences):
            return True
        low, high = t_interval(np.array(self.differences))
        return math.isnan(low) or low <= 0 <= high

    def forgets(self, way: int) -> float:
        """Return the largest forgetting of any seed."""
        return max(forgetting(pair[way].accuracy) for pair in self.pairs)

    def steps_per_second(self, way: int) -> float:
        """Return the steps of all seeds, over the time of the one that took longest; nan if a record does not count them."""
        records = [pair[way] for pair in self.pairs]
        steps = [math.nan if r.costs is None or r.costs.steps is None else r.costs.steps for r in records]
        return sum(steps) / max(record.seconds.total for record in records)


def compare(one: Path, two: Path) -> list[Comparison]:
    """Return a comparison of every method, in each of its settings, that has records of the same runs in both folders."""
    found: dict[str, list[Pair]] = {}
    for path in sorted(one.glob("*.json")):
        if (two / path.name).exists():
            pair = Record.load(path), Record.load(two / path.name)
            found.setdefault(str(replace(pair[0].spec, seed=0)), []).append(pair)
    return [Comparison(f"{pairs[0][0].spec.benchmark} {pairs[0][0].spec.method}", pairs) for pairs in found.values()]


def cells(comparison: Comparison) -> list[str]:
    """What the table says of a comparison."""
    differences = comparison.differences
    low, high = t_interval(np.array(differences))
    return [
        comparison.title,
        str(len(differences)),
        *(f"{np.mean(a):.2f} ± {np.std(a, ddof=1) if len(a) > 1 else 0:.2f}" for a in map(comparison.accuracies, (0, 1))),
        f"{np.mean(differences):+.2f} ({low:+.2f} to {high:+.2f})",
        "yes" if comparison.alike else "NO",
        *(f"{comparison.forgets(way):.4f}" for way in (0, 1)),
        *(f"{comparison.steps_per_second(way):,.0f}" for way in (0, 1)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("one", type=Path)
    parser.add_argument("two", type=Path)
    words = parser.parse_args()
    comparisons = compare(words.one, words.two)
    if not comparisons:
        sys.exit(f"{words.one} and {words.two} have no records of the same run")
    table = Table("", "n", "accuracy 1", "accuracy 2", "1 - 2", "alike", "forgetting 1", "2", "steps/s 1", "2")
    for comparison in comparisons:
        table.add_row(*cells(comparison))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
