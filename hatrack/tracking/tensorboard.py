"""TensorBoard: the lines of a run as event files, which its own readers show without gaps or doubles.

An event file cannot be corrected. TensorBoard has a mark for that: a session that starts at a step hides all events from
that step on. So a run that goes on marks step 0 and writes all its lines once more; a fit that begins again marks its first.
"""

import re
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hatrack.text import printable
from hatrack.tracking.lines import Line, RunLines
from hatrack.tracking.tracker import scalars

SECOND = re.compile(r"tfevents\.(\d+)\.")  # in the name of an event file
FLUSH = 5  # seconds after which events are on the disk
MISSING = "--log tensorboard needs the package tensorboard: pip install 'hatrack[tensorboard]'"


class TensorBoard:
    """Writes the curves of a run for TensorBoard: `tensorboard --logdir FOLDER` shows them.

    The x axis is the number of epochs of the whole run. There are the losses, the validation score, the learning rate, the
    number of the task, the share of every layer in use, and after each task the test score of every task.

    Args:
        folder: where the event files go; a folder for each run. A run that goes on needs the same folder.

    Raises:
        ValueError: the package tensorboard is not installed.

    Example:
        >>> fit = hr.Trainer(hr.Regime(epochs=2), log=hr.TensorBoard("logs/first"))
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._writer: Any = None
        self._last = 0  # the last step that was written
        import_tensorboard()

    def __repr__(self) -> str:
        return f"TensorBoard({str(self.folder)!r})"

    def begin(self, lines: RunLines) -> None:
        """Open a file of events, and write the lines of processes before once more."""
        summary_writer = import_tensorboard()
        again = _wait_for_a_later_name(self.folder)
        self._writer = summary_writer(str(self.folder), purge_step=0 if again else None, flush_secs=FLUSH)
        if lines.about.get("spec"):
            self._writer.add_text("run", "\n\n".join(_described(lines.about)), 0)
        for line in lines.all():
            self.add(line, lines)

    def add(self, line: Line, lines: RunLines) -> None:
        """Write the numbers of a line."""
        found = scalars(line, lines)
        if line["kind"] == "epoch":
            if line["step"] <= self._last:
                self._hide_from(line["step"])
            self._last = line["step"]
        for name, value in found.items():
            self._writer.add_scalar(_tag(name), value, line["step"], walltime=line.get("time"))

    def _hide_from(self, step: int) -> None:
        """Mark that the events from a step on do not hold any more."""
        events = import_events()
        start = events.SessionLog(status=events.SessionLog.START)
        self._writer.file_writer.add_event(events.Event(session_log=start), step)

    def end(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


def _wait_for_a_later_name(folder: Path) -> bool:
    """Return whether there are event files. Readers sort them by name, which has the second: wait for a later one."""
    seconds = [int(found[1]) for path in folder.glob("events.out.tfevents.*") if (found := SECOND.search(path.name))]
    until = time.monotonic() + 2  # a clock may have been set back
    while seconds and int(time.time()) <= max(seconds) and time.monotonic() < until:
        time.sleep(0.05)
    return bool(seconds)


def import_tensorboard() -> Any:
    """Return torch's SummaryWriter; raise a ValueError in one line if tensorboard is missing."""
    with suppress(ImportError):
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter
    raise ValueError(MISSING)


def import_events() -> Any:
    """Return TensorBoard's module of events."""
    from tensorboard.compat.proto import event_pb2

    return event_pb2


def _tag(name: str) -> str:
    """Return the name of a curve as TensorBoard takes it."""
    return printable(name) or "?"


def _described(about: Line) -> Iterable[str]:
    yield f"**{printable(about.get('name', ''))}**"
    for key, value in about["spec"].items():
        yield f"{key}: {printable(value)}"
