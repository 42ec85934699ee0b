"""Progress while runs go on: a bar with the time left and a line per run on a terminal; in a log, one line a minute."""

import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from hatrack.experiments.run import Run
from hatrack.text import duration, printable, score_text
from hatrack.tracking.lines import Line, RunLines
from hatrack.tracking.progress import seconds_left, share_done, status_text
from hatrack.training.progress import ProgressEvent

EVERY = 60.0  # seconds between two lines in a log
BAR = 10  # columns of the bar, at least
CELLS = 8  # of the small bar of a run
TIME = 8  # columns of a time: 12:34:56
UNKNOWN = "-:--:--"


def describe(spec: Run, event: ProgressEvent) -> tuple[float, str]:
    """Return the share of a run that is done, and a line with its method, seed, task, epoch, loss and accuracy."""
    task, tasks, regime, result = event
    last = result.epochs[-1]
    accuracy = "" if last.valid_accuracy is None else f", {score_text(result.score, last.valid_accuracy)}"
    done = max(0.0, (task.index + len(result.epochs) / regime.epochs) / tasks)  # the pretraining is task -1
    where = f"{spec.method} seed {spec.seed}: {printable(task.name)} ({task.index + 1} of {tasks})"
    return done, f"{where}, epoch {len(result.epochs)}, loss {last.loss:.3f}{accuracy}"


class RunStatus:
    """What the terminal shows of a run, from its lines."""

    def __init__(self) -> None:
        self.lines = RunLines()

    def __call__(self, line: Line) -> tuple[float, str, float | None]:
        """Take a line; return the share of the run that is done, where it stands, and the seconds that are left."""
        self.lines.add(dict(line))
        return share_done(self.lines), status_text(self.lines), seconds_left(self.lines)


def clock(seconds: float | None) -> str:
    """Return a time as 1:02:03; dashes if it is not known."""
    if seconds is None:
        return UNKNOWN
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


class TimeLeft(ProgressColumn):
    """The time until all runs are done, by the pace of this display."""

    def __init__(self, display: "Display", column: Column) -> None:
        self.display = display
        super().__init__(column)

    def render(self, task: Task) -> Text:
        """Return the time."""
        return Text(clock(self.display.seconds_left), style="progress.remaining")


class Lines(Progress):
    """A bar, and below it a line for each run under way."""

    def __init__(self, display: "Display", *columns: ProgressColumn, console: Console) -> None:
        self.display = display
        shown = console.is_terminal
        super().__init__(*columns, console=console, expand=True, disable=not shown, transient=True)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the bar, then the lines, each cut at the width of the terminal."""
        yield self.make_tasks_table(self.tasks)
        yield from self.display.run_lines()


class Display:
    """A bar over all runs with the time left, and below it where the runs under way stand.

    The bar and the times are always visible; the other lines are cut at the width of the terminal. Without a terminal it is
    one line every `EVERY` seconds.

    Args:
        runs: how many runs there are.
        parallel: how many go on at a time; if there are several, each has a line with a bar and a time left of its own.
    """

    def __init__(self, runs: int, parallel: int = 1) -> None:
        console = Console(stderr=True)
        self.parallel = parallel
        self.done, self.before = [0.0] * runs, [0.0] * runs  # before: what was done when this display began
        self.texts: dict[int, tuple[str, float | None]] = {}  # of the runs under way, with their seconds left
        self.began = self.said = time.monotonic()
        self.bar = Lines(
            self,
            BarColumn(None, table_column=Column(ratio=1, min_width=BAR)),
            TextColumn("{task.percentage:>3.0f}%", table_column=Column(width=4, no_wrap=True)),
            TimeElapsedColumn(table_column=Column(width=TIME, no_wrap=True)),
            TextColumn("left", table_column=Column(width=4, no_wrap=True)),
            TimeLeft(self, Column(width=TIME, no_wrap=True, justify="left")),
            console=console,
        )
        self.line = self.bar.add_task("", total=runs)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    @property
    def seconds_left(self) -> float | None:
        """The time until all runs are done; None if it is not known yet."""
        gained, elapsed = sum(self.done) - sum(self.before), time.monotonic() - self.began
        return elapsed * (len(self.done) - sum(self.done)) / gained if gained > 0 and elapsed > 0 else None

    def begin(self, number: int, done: float) -> None:
        """Note how much of a run was done before; it says nothing about the pace."""
        self.done[number] = self.before[number] = done

    def show(self, number: int, done: float, text: str, left: float | None = None) -> None:
        """Show how much of run `number` is done.

        Args:
            number: the number of the run, from 0.
            done: from 0 to 1.
            text: where the run stands; an empty text says that it has ended.
            left: its seconds left, if they are known.
        """
        if not text and done == 1 and not self.done[number]:
            self.before[number] = 1.0  # it had its record
        self.done[number] = done
        if text:
            others = self.texts if self.parallel > 1 else {}
            self.texts = {**others, number: (text, left)}  # a new table: another thread may be reading the old one
        elif self.parallel > 1:
            self.texts = {other: shown for other, shown in self.texts.items() if other != number}
        self.bar.update(self.line, completed=sum(self.done))
        if self.bar.disable and text:
            self._say(text)

    def run_lines(self) -> Iterable[RenderableType]:
        """Yield a line for each run under way; if several are, with a bar and the time left before the text."""
        if not self.texts:
            yield Text("starting" if not any(self.done) else "")
        for number, (text, left) in sorted(self.texts.items()):
            shown = Text(" ".join(text.split()), no_wrap=True, overflow="ellipsis")
            if self.parallel < 2:
                yield shown
                continue
            bar = ProgressBar(1.0, self.done[number], CELLS)
            grid = Table.grid(Column(width=CELLS), Column(width=TIME), Column(ratio=1), padding=(0, 1, 0, 0), expand=True)
            grid.add_row(bar, Text(f"{clock(left):>{TIME}}", style="progress.remaining"), shown)
            yield grid

    def _say(self, text: str) -> None:
        """Print a line, unless there was one a short time ago."""
        now = time.monotonic()
        if now - self.said < EVERY:
            return
        self.said = now
        left = "" if self.seconds_left is None else f", {duration(self.seconds_left)} left"
        line = f"hatrack: {sum(self.done) / len(self.done):.0%} after {(now - self.began) / 60:.0f} min{left}; {text}"
        with suppress(OSError, ValueError):  # a log that cannot be written must not end a run
            print(" ".join(line.split()), file=sys.stderr, flush=True)
