"""What a person sees while runs go on: a bar on a terminal, and otherwise, in a log, a line now and then."""

import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hatrack.experiments.run import Run
from hatrack.training.trainer import ProgressEvent

EVERY = 60.0  # seconds between two lines in a log


def describe(spec: Run, event: ProgressEvent) -> tuple[float, str]:
    """How much of a run is done, and a line that says where it stands."""
    task, tasks, regime, result = event
    last = result.epochs[-1]
    accuracy = "" if last.valid_accuracy is None else f", accuracy {last.valid_accuracy:.1%}"
    done = (task.index + len(result.epochs) / regime.epochs) / tasks
    where = f"{spec.method} seed {spec.seed}: {task.name} ({task.index + 1} of {tasks})"
    return done, f"{where}, epoch {len(result.epochs)}, loss {last.loss:.3f}{accuracy}"


class Display:
    """A bar over all runs, with the task, epoch, loss and accuracy of the one that moved last, and the time left.
    Where there is no terminal, a line now and then."""

    def __init__(self, runs: int) -> None:
        console = Console(stderr=True)
        self.bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
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
        """Run `number` stands here now; an empty text leaves the line as it is."""
        self.done[number] = done
        self.bar.update(self.line, completed=sum(self.done), description=text or None)
        now = time.monotonic()
        if self.bar.disable and text and now - self.said >= EVERY:
            self.said = now
            line = f"hatrack: {sum(self.done) / len(self.done):.0%} after {(now - self.began) / 60:.0f} min; {text}"
            with suppress(OSError, ValueError):  # a log that can't be written ends no run
                print(" ".join(line.split()), file=sys.stderr, flush=True)
