"""What a worker does with a job: it carries out the run in a folder of its node, and sends on what the run saves."""

import errno
import json
import os
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from hatrack.clusters.jobs import Job, Result, Seen, changes, read_files, write_files
from hatrack.clusters.sent_data import fetch_set
from hatrack.experiments.progress import describe
from hatrack.experiments.record import Record
from hatrack.experiments.run import folder_of, run
from hatrack.experiments.run_folder import RunFolder
from hatrack.methods.divergence import Diverged
from hatrack.text import printable, shorten
from hatrack.training.checkpoint import Stopped, stopping
from hatrack.training.progress import ProgressEvent

SPEAK, SEND, POLL = 0.5, 2.0, 0.05  # seconds between words to the driver, between looks for new files, waiting for an answer
PATIENCE = 120.0  # seconds to wait for the lock of a run in a shared folder: that of a node which is gone may last
LEFT = "hatrack-run-"  # the folders of runs on a node: with the number of the process
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)  # the disk of a node is to blame


class Line(Protocol):
    """How a worker speaks with the driver: see `Mailbox`."""

    def begin(self, name: str, node: str) -> tuple[int, bool]: ...

    def post(self, name: str, attempt: int, kind: str, content: Any) -> bool: ...

    def answer(self, name: str, attempt: int) -> tuple[bool, Any]: ...


@dataclass
class Reporter:
    """Tells the driver, in a thread, how far a run is and what it has saved, and asks whether to stop.

    Args:
        line: to the driver.
        job: the run.
        attempt: which attempt this is.
        folder: the files of the run; None if they need not travel.
    """

    line: Line
    job: Job
    attempt: int
    folder: RunFolder | None
    latest: tuple[float, str] | None = None
    seen: Seen = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def progress(self, event: ProgressEvent) -> None:
        """Note how far the run is; it is sent on later."""
        self.latest = describe(self.job.spec, event)

    def warn(self, message: Warning | str, *_: Any, **__: Any) -> None:
        """Send a warning to the driver; this replaces `warnings.showwarning`."""
        self.line.post(self.job.name, self.attempt, "warning", printable(message))

    def watch(self) -> None:
        """Until the run has ended: speak, and stop the run if the driver says so."""
        next_look = time.monotonic() + SEND
        while not self.ended.wait(SPEAK):
            with suppress(OSError):
                if self.speak(files=time.monotonic() >= next_look):
                    stopping.set()
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + SEND

    def speak(self, *, files: bool) -> bool:
        """Tell the driver what is new; return whether the run is to stop."""
        name, stop = self.job.name, False
        if files and self.folder:
            changed, names = changes(self.folder, self.seen)
            if changed or names != self.names:
                self.names = names
                stop |= self.line.post(name, self.attempt, "files", (changed, names))
        said, self.latest = self.latest, None
        return stop | self.line.post(name, self.attempt, "progress", said)


def carry_out(job: Job, line: Line, node: str) -> Result:
    """Carry out a job on this node, from the files that its run has left so far.

    Args:
        job: the job.
        line: to the driver.
        node: the name of this node.

    Returns:
        The result. It raises nothing: whatever goes wrong is the end of this run alone.
    """
    attempt, stop = line.begin(job.name, node)
    if stop:
        return Result("stopped", "stopped before it began", node=node)
    stopping.clear()
    torch.set_num_threads(job.threads)
    try:
        if job.folder is not None:
            return _run(job, line, attempt, node, job.folder, None)
        with _own_folder() as place:
            folder = folder_of(job.spec, place)
            write_files(folder, job.files if attempt == job.attempt else ask(line, job.name, attempt, "files", None) or {})
            result = _run(job, line, attempt, node, place, folder)
            if result.end != "node":  # the place of a full disk is that of the node
                result = result._replace(text=result.text.replace(str(place), job.out))
            return result._replace(files=read_files(folder))
    except OSError as error:
        return _of_error(error, node)
    finally:
        stopping.clear()


def _run(job: Job, line: Line, attempt: int, node: str, out: Path, travels: RunFolder | None) -> Result:
    """Carry out the run in a folder and tell how it ended."""
    reporter = Reporter(line, job, attempt, travels)
    reporter.names = changes(travels, reporter.seen)[1] if travels else []
    thread = threading.Thread(target=reporter.watch, daemon=True)
    shown, warnings.showwarning = warnings.showwarning, reporter.warn
    thread.start()
    try:
        if travels is None:
            _wait_for_lock(folder_of(job.spec, out))

        def ask_for_set(name: str) -> Any:
            return ask(line, job.name, attempt, "set", name)

        watch = job.how.get("after_task") and _asking(line, job.name, attempt)
        how = {**job.how, "after_task": watch or None, "progress": reporter.progress}
        record = _with_data(lambda: run(job.spec, out, **how), ask_for_set if job.send else None)
        return Result("record", json.dumps(record.to_dict()), node=node)
    except Diverged as error:
        return Result("diverged", str(error), node=node)
    except Stopped as error:
        return Result("stopped", str(error), node=node)
    except Exception as error:
        return _of_error(error, node)
    finally:
        warnings.showwarning = shown
        reporter.ended.set()
        thread.join()


def _of_error(error: Exception, node: str) -> Result:
    """Return the result of a run that failed. A full disk is that of this node, and another one may have room."""
    text = str(error) or type(error).__name__
    full = isinstance(error, OSError) and error.errno in FULL
    full |= any(os.strerror(number) in text for number in FULL)  # a state that can't be saved is a ValueError with this text
    expected = isinstance(error, ValueError | OSError | MemoryError)
    said = text if expected else f"{type(error).__name__}: {text}"
    return Result("node" if full else "failed", shorten(printable(said), 500), node=node)


def ask(line: Line, name: str, attempt: int, question: str, content: Any) -> Any:
    """Ask the driver and wait for its answer; None if another attempt has taken the place of this one."""
    line.post(name, attempt, "question", (question, content))
    while True:
        found, answer = line.answer(name, attempt)
        if found or stopping.is_set():
            return answer
        time.sleep(POLL)


class Ended(Exception):  # noqa: N818
    """The driver ended the run after a task: see `after_task` of `run`."""


def _asking(line: Line, name: str, attempt: int) -> Callable[[Any], None]:
    """Return a function for `after_task` that asks the driver whether the run goes on."""

    def after_task(rows: Any) -> None:
        if said := ask(line, name, attempt, "after_task", rows):
            raise Ended(said)

    return after_task


def _with_data(function: Callable[[], Record], ask_for_set: Callable[[str], Any] | None) -> Record:
    """Call a function; if data sets are missing and the driver sends them, once more."""
    try:
        return function()
    except FileNotFoundError as error:
        names = getattr(error, "names", ())
        if not names or ask_for_set is None or not all(fetch_set(name, ask_for_set) for name in names):
            raise
    return function()


def _wait_for_lock(folder: RunFolder) -> None:
    """Wait for the lock of a run in a shared folder, which a node that is gone may keep for a while."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and not stopping.is_set() and folder.blocked:
        time.sleep(SPEAK)


@contextmanager
def _own_folder() -> Iterator[Path]:
    """A new folder of this process on this node; those of processes that were killed are removed."""
    place = Path(tempfile.gettempdir())
    for old in place.glob(f"{LEFT}*"):
        number = old.name.removeprefix(LEFT).partition("-")[0]
        if (
            number.isdigit()
            and not Path(f"/proc/{number}").exists()
            and Path("/proc/self").exists()
            and not old.is_symlink()
        ):
            shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{LEFT}{os.getpid()}-", dir=place) as folder:
        yield Path(folder)
