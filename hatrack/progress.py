"""What a person sees while runs go on; nothing when the output is not a terminal."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hatrack.run import Run
from hatrack.trainer import Moment
from hatrack.trainer import Progress as Callback

STEPS = 1000  # of the bar, per run


class Display:
    """A bar over all runs, with the task, epoch, loss and accuracy of the one under way."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.console = Console(stderr=True)
        self.bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        self.total = len(runs)
        self.done = 0
        self.line = self.bar.add_task("", total=self.total * STEPS)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def start(self, spec: Run) -> Callback:
        """The callback of one run."""

        def progress(moment: Moment) -> None:
            task, tasks, regime, fitted = moment
            last = fitted.epochs[-1]
            accuracy = "" if last.valid_accuracy is None else f", accuracy {last.valid_accuracy:.1%}"
            self.bar.update(
                self.line,
                completed=STEPS * (self.done + (task.index + len(fitted.epochs) / regime.epochs) / tasks),
                description=f"{spec.method} seed {spec.seed}: {task.name} ({task.index + 1} of {tasks}), "
                f"epoch {len(fitted.epochs)}, loss {last.loss:.3f}{accuracy}",
            )

        return progress

    def finish(self) -> None:
        """The run that was under way is done."""
        self.done += 1
        self.bar.update(self.line, completed=STEPS * self.done)
