"""Progress while runs go on: a bar on a terminal; elsewhere, in a log, one line a minute."""

import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from hatrack.experiments.run import Run
from hatrack.text import printable, score_text
from hatrack.training.progress import ProgressEvent

EVERY = 60.0  # seconds between two lines in a log
BAR = 10  # columns of the bar


def describe(spec: Run, event: ProgressEvent) -> tuple[float, str]:
    """Return the share of a run that is done, and a line with its method, seed, task, epoch, loss and accuracy."""
    task, tasks, regime, result = event
    last = result.epochs[-1]
    accuracy = "" if last.valid_accuracy is None else f", {score_text(result.score, last.valid_accuracy)}"
    done = max(0.0, (task.index + len(result.epochs) / regime.epochs) / tasks)  # the pretraining is task -1
    where = f"{spec.method} seed {spec.seed}: {printable(task.name)} ({task.index + 1} of {tasks})"
    return done, f"{where}, epoch {len(result.epochs)}, loss {last.loss:.3f}{accuracy}"


class Display:
    """A bar over all runs, with the line of the run that reported last, the time spent and the time left.

    If the terminal is narrow, the line is cut; the bar and the times stay visible. Without a terminal it is one line every
    `EVERY` seconds.

    Args:
        runs: how many runs there are.
    """

    def __init__(self, runs: int) -> None:
        console = Console(stderr=True)
        self.bar = Progress(
            SpinnerColumn(table_column=Column(width=1)),
            TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            BarColumn(BAR, table_column=Column(width=BAR)),
            TimeElapsedColumn(table_column=Column(width=8)),
            TextColumn("left", table_column=Column(width=4)),
            TimeRemainingColumn(table_column=Column(width=8)),
            console=console,
            expand=True,
            disable=not console.is_terminal,
            transient=True,
        )
        self.line = self.bar.add_task("starting", total=runs)
        self.done = [0.0] * runs
        self.began = self.said = time.monotonic()

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def show(self, number: int, done: float, text: str) -> None:
        """Show how much of run `number` is done; an empty text leaves the line as it is."""
        self.done[number] = done
        self.bar.update(self.line, completed=sum(self.done), description=text or None)
        now = time.monotonic()
        if self.bar.disable and text and now - self.said >= EVERY:
            self.said = now
            line = f"hatrack: {sum(self.done) / len(self.done):.0%} after {(now - self.began) / 60:.0f} min; {text}"
            with suppress(OSError, ValueError):  # a log that cannot be written must not end a run
                print(" ".join(line.split()), file=sys.stderr, flush=True)
