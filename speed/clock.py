"""The clock of all comparisons: contestants take turns, so that a machine's good and bad moments meet them all."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median, quantiles

import torch

from hatrack.engine.recorded import WARM_UP

WARM = WARM_UP + 1  # rounds or epochs, until the last and smaller batch of an epoch is recorded too
Turn = Callable[[], float]  # does its work once and tells the seconds


@dataclass(frozen=True)
class Row:
    """One contestant: seconds of its turns per step or epoch, or why there are none."""

    name: str
    seconds: list[float] = field(default_factory=list)
    skipped: str = ""

    @property
    def median(self) -> float:
        return median(self.seconds)

    def times(self, other: "Row") -> tuple[float, float, float]:
        """How many times as long as the other: median and quartiles over the turns, each with its counterpart.

        A fleet has no turns: one number for all three.
        """
        if len(self.seconds) != len(other.seconds) or len(self.seconds) < 2:
            return (self.median / other.median,) * 3
        ratios = [a / b for a, b in zip(self.seconds, other.seconds, strict=True)]
        low, middle, high = quantiles(ratios, n=4, method="inclusive")
        return middle, low, high


@dataclass(frozen=True)
class Contest:
    """Contestants that did the same."""

    title: str
    unit: str  # what the seconds are for: a step or an epoch
    rows: list[Row]
    usual: tuple[str, ...]  # the rows of the engines that short and long runs use here if nobody asks for another

    def row(self, name: str) -> Row | None:
        return next((row for row in self.rows if row.name == name and row.seconds), None)


def timed(work: Callable[[], object], device: torch.device) -> Turn:
    """On a GPU the time until its work is done. On a CPU, where all is done by one thread, the processor time of it: the
    same on an idle machine, and on a busy one not disturbed by others."""

    def turn() -> float:
        if device.type == "cpu":
            start = time.process_time()
            work()
            return time.process_time() - start
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        work()
        torch.cuda.synchronize(device)
        return time.perf_counter() - start

    return turn


def in_turns(turns: dict[str, Turn], rounds: int, per: int) -> list[Row]:
    """Everyone in turn, again and again. The first rounds warm up; who fails in them is out, with the reason."""
    rows = {name: Row(name) for name in turns}
    for number in range(-WARM, rounds):
        for name, row in rows.items():
            if row.skipped:
                continue
            try:
                seconds = turns[name]()
            except Exception as error:  # a compiler that is missing, for example
                if number >= 0:
                    raise
                rows[name] = Row(name, skipped=(str(error).splitlines() or [type(error).__name__])[0])
                continue
            if number >= 0:
                row.seconds.append(seconds / per)
    return list(rows.values())
