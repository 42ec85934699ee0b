"""Writes the lines of a run, one after every epoch, into a file and to trackers."""

import os
import secrets
import socket
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hatrack.methods.fit import FitResult
from hatrack.text import printable, shorten
from hatrack.tracking.lines import SCHEMA, Line, RunLines, to_text
from hatrack.tracking.reader import LinesReader
from hatrack.tracking.tracker import Tracker


class EpochLog:
    """The lines of one run. It never ends a run: what cannot be written is told once, in a warning.

    Args:
        path: the file of the lines; None to keep none.
        trackers: what is given each line as well.

    Attributes:
        lines: the lines that hold so far, also those of processes before.
        began: when the run began, by `time.perf_counter`; the seconds of lines count from there.
        spent: the seconds that processes before took.
    """

    def __init__(self, path: Path | None = None, trackers: Sequence[Tracker] = ()) -> None:
        self.path, self.trackers = path, list(trackers)
        self.lines = RunLines()
        self.began, self.spent = time.perf_counter(), 0.0
        self._file: int | None = None
        self._is_open = False

    # The beginning and the end of a process

    def open(self, **about: Any) -> None:
        """Read what processes before have written, give it to the trackers, and say what is run.

        Args:
            about: what the line of the run has, beside the time and the process: name, spec, tasks.
        """
        self._is_open = True
        if self.path is not None:
            reader = LinesReader(self.path)
            reader.update()
            self.lines = reader.lines
            self._open_file()
        first = self.lines.first.get("id")
        about = {"kind": "run", "id": first or secrets.token_hex(8), "schema": SCHEMA, "tasks": [], **about}
        about |= {"time": time.time(), "pid": os.getpid(), "host": socket.gethostname()}
        self.lines.add(about)
        self._write(about)
        self._tell(lambda tracker: tracker.begin(self.lines))

    def _open_file(self) -> None:
        assert self.path is not None
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # no link, and no pipe that nobody reads
        try:
            self._file = os.open(self.path, flags, 0o600)
            if self.path.stat().st_size:
                os.write(self._file, b"\n")  # the last line may be half written
        except OSError as error:
            self._give_up(error)

    def end(self, why: str) -> None:
        """Say how the process ends: "finished", or why it does not go on; then close the file and the trackers."""
        if not self._is_open:
            return
        self.add({"kind": "end", "why": shorten(printable(why), 300)})
        self._tell(lambda tracker: tracker.end())
        self._is_open = False
        if self._file is not None:
            os.close(self._file)
            self._file = None

    # Lines

    def epoch(self, task: int, fit: int, epochs: int, result: FitResult) -> None:
        """Write the line of the last epoch of a fit.

        Args:
            task: the number of the task; -1 is the pretraining.
            fit: the number of the fit among those of the task.
            epochs: how many epochs the fit has at most.
            result: the result of the fit so far.
        """
        self.add(epoch_line(task, fit, epochs, result, len(result.epochs) - 1))

    def restore(self, task: int, fit: int, epochs: int, result: FitResult) -> None:
        """Write the lines of a fit that goes on from a saved state, unless they are there: then no curve has a gap."""
        known = self.lines.fits.get((task, fit, result.halved))
        have = {line["epoch"] for line in known.lines} if known else set()
        first = next((epoch for epoch in range(len(result.epochs)) if epoch not in have), len(result.epochs))
        for epoch in range(first, len(result.epochs)):
            self.add(epoch_line(task, fit, epochs, result, epoch), measured=False)

    def task(self, task: int, usage: dict[str, float], *, measured: bool = True) -> None:
        """Write the line of a task that was learned: the share of every layer that finished tasks use."""
        self.add({"kind": "task", "task": task, "usage": usage}, measured=measured)

    def scores(self, task: int, accuracy: Iterable[float], *, measured: bool = True) -> None:
        """Write the test accuracy of every task after one of them was learned."""
        self.add({"kind": "scores", "task": task, "accuracy": list(accuracy)}, measured=measured)

    def add(self, line: Line, *, measured: bool = True) -> None:
        """Write a line, with the time if it was measured just now."""
        if not self._is_open:
            self.open()
        if measured:
            line |= {"time": time.time(), "seconds": round(self.spent + time.perf_counter() - self.began, 3)}
        self.lines.add(line)
        self._write(line)
        self._tell(lambda tracker: tracker.add(line, self.lines))

    def _write(self, line: Line) -> None:
        if self._file is None:
            return
        try:
            os.write(self._file, to_text(line).encode() + b"\n")  # one call, so that lines of two processes do not mix
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        warnings.warn(f"{self.path} can't be written ({error.strerror}); the run goes on without it", stacklevel=3)
        with suppress(OSError):
            if self._file is not None:
                os.close(self._file)
        self._file = None

    def _tell(self, what: Callable[[Tracker], None]) -> None:
        """Call something of every tracker; one that fails is given up."""
        for tracker in list(self.trackers):
            try:
                what(tracker)
            except Exception as error:  # a tracker's network or disk must not end a run
                self.trackers.remove(tracker)
                said = shorten(printable(f"{type(error).__name__}: {error}"), 200)
                warnings.warn(f"{tracker!r} failed ({said}); the run goes on without it", stacklevel=3)


def epoch_line(task: int, fit: int, epochs: int, result: FitResult, epoch: int) -> Line:
    """Return the line of one epoch of a fit; the arguments are those of `EpochLog.epoch`, and the number of the epoch."""
    found = result.epochs[epoch]
    line: Line = {"kind": "epoch", "task": task, "fit": fit, "halved": result.halved, "epoch": epoch, "epochs": epochs}
    line |= found._asdict()
    if len(result.used) > epoch:
        line["used"] = result.used[epoch]
    if len(result.watched) > epoch:
        line["watched"] = result.watched[epoch]
    return line
