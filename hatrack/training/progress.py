"""Progress while a Trainer fits: a bar in a terminal or a notebook, nothing in a log, or a user's own callback."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from hatrack.methods.fit import FitResult
from hatrack.regime import Regime
from hatrack.tasks.task import Task
from hatrack.text import printable, score_text, shorten

if TYPE_CHECKING:
    from rich.console import Console

BAR = 8  # columns of the bar
TIME = 7  # of the time left
BESIDE = BAR + len("left") + TIME + 3  # of all that is beside the text, with the gaps
NAME = 8  # letters that are shown of a task's name in any case
MEMORY = 3600.0  # seconds of epochs by which the time left is estimated


class ProgressEvent(NamedTuple):
    """What a progress callback is given after every epoch.

    Attributes:
        task: the task that is learned.
        tasks: how many tasks the network knows.
        regime: the regime of this fit.
        result: the result of the fit so far.
    """

    task: Task
    tasks: int
    regime: Regime
    result: FitResult


Progress = Callable[[ProgressEvent], None]


def find_console() -> "Console | None":
    """Return the console to show progress on, or None if standard error is neither a terminal nor a notebook's."""
    try:
        terminal = sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is no stream, or it is closed
        terminal = False
    if not terminal and "ipykernel" not in sys.modules:
        return None
    from rich.console import Console  # only here, since most programs show nothing and rich takes time to import

    console = Console(stderr=True)
    return console if console.is_terminal or console.is_jupyter else None


@contextmanager
def show_progress(progress: Progress | bool | None, task: Task, epochs: int) -> Iterator[Progress]:
    """Show the progress of one fit.

    Args:
        progress: a callback; False shows nothing; None or True shows a bar if there is a terminal or a notebook.
        task: the task of the fit.
        epochs: how many epochs it has at most.

    Yields:
        What is to be called after every epoch.
    """
    console = None if callable(progress) or progress is False else find_console()
    if console is None:
        yield progress if callable(progress) else lambda event: None
        return
    with bar_on(console, task.name, epochs) as show:
        yield show


@contextmanager
def bar_on(console: "Console", name: str, epochs: int) -> Iterator[Progress]:
    """Show a bar that is removed at the end: task, epoch, loss, validation accuracy, time left.

    If the terminal is narrow, the name of the task is cut, then the text; the bar and the time left stay visible.
    """
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    columns = (
        TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
        BarColumn(BAR, table_column=Column(width=BAR, no_wrap=True)),
        TextColumn("left", table_column=Column(width=4, no_wrap=True)),
        TimeRemainingColumn(table_column=Column(min_width=TIME, no_wrap=True)),
    )

    def describe(text: str) -> str:
        return f"{shorten(printable(name), max(NAME, console.width - BESIDE - len(text) - 2))}, {text}"

    with Bar(*columns, console=console, transient=True, expand=True, speed_estimate_period=MEMORY) as bar:
        line = bar.add_task(describe(f"epoch 1 of max {epochs}"), total=epochs)

        def show(event: ProgressEvent) -> None:
            bar.update(line, completed=len(event.result.epochs), description=describe(describe_epoch(event)))

        yield show


def describe_epoch(event: ProgressEvent) -> str:
    """Return the last epoch in words: its number, its loss and, if there is validation data, its accuracy."""
    epochs = event.result.epochs
    value = epochs[-1].valid_accuracy
    accuracy = "" if value is None else f", {score_text(event.result.score, value)}"
    return f"epoch {len(epochs)} of max {event.regime.epochs}, loss {epochs[-1].loss:.3g}{accuracy}"
