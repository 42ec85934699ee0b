"""A folder of records and of runs that go on, looked at again and again: what has not changed is not read again."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hatrack.experiments.record import Record
from hatrack.experiments.run_folder import AGAIN
from hatrack.text import printable, shorten
from hatrack.tracking.reader import FILE, LinesReader
from hatrack.watching.state import POINTS, run_state, status_now

PATIENCE = 10.0  # a page of many records is made again after so many times the seconds that it took
RUNS = 20  # that have whole curves; more of them share the points
CURVES = 100  # runs that have a curve at all
Seen = tuple[int, int, int]  # size, time and inode of a file
Collect = Callable[..., dict[str, Any]]


class WatchedFolder:
    """The records and the runs of a folder. Several processes and machines may write into it.

    Args:
        folder: the folder.
        collect: `hatrack.reporting.page.collect`.
    """

    def __init__(self, folder: Path, collect: Collect) -> None:
        self.folder, self.collect = folder, collect
        self.records: dict[str, tuple[Seen, Record | str]] = {}  # by the name of the file; a text says why it is none
        self.runs: dict[str, LinesReader] = {}
        self._states: dict[str, tuple[tuple[int, int, int] | None, dict[str, Any]]] = {}
        self._data: dict[str, Any] = {}
        self._of: dict[str, Seen] | None = None  # the records that the data are of
        self._next = 0.0  # when the data may be made again

    def data(self) -> dict[str, Any]:
        """Return the data of the page as they are now."""
        self._look()
        now = time.monotonic()
        seen = {name: found for name, (found, _) in self.records.items()}
        if self._of is None or (seen != self._of and now >= self._next):
            self._data, self._of = self._collect(), seen
            self._next = time.monotonic() + PATIENCE * (time.monotonic() - now)
        return {**self._data, "running": self.running()}

    def running(self) -> list[dict[str, Any]]:
        """Return where every run stands that has no record; those that go on come first."""
        points = max(50, min(POINTS, RUNS * POINTS // max(1, len(self.runs))))
        found = [self._state(name, points) for name in self.runs if not self._is_done(name)]
        found.sort(key=lambda state: (state["status"] != "running", state["name"]))
        return [state if k < CURVES else {**state, "curve": []} for k, state in enumerate(found)]

    def _state(self, name: str, points: int) -> dict[str, Any]:
        """Return where a run stands; if it has no new line, only whether it still goes on is looked up."""
        lines = self.runs[name].lines
        of, state = self._states.get(name, (None, {}))
        if of != (id(lines), lines.count, points):
            state = run_state(name, lines, points)
            self._states[name] = (id(lines), lines.count, points), state
        return {**state, **status_now(lines, state["left"])}

    def _is_done(self, name: str) -> bool:
        """Return whether a run has its record, and is not run again now."""
        return f"{name}.json" in self.records and not (self.folder / f"{name}.part" / AGAIN).exists()

    def _collect(self) -> dict[str, Any]:
        whole = [record for _, record in self.records.values() if isinstance(record, Record)]
        left_out = [{"name": name, "why": why} for name, (_, why) in self.records.items() if isinstance(why, str)]
        try:
            return self.collect(whole, left_out=left_out, running=[])
        except ValueError as error:  # records that contradict each other
            why = shorten(printable(error), 300)
            return self.collect([], left_out=[*left_out, {"name": str(self.folder), "why": why}], running=[])

    def _look(self) -> None:
        """Read what is new in the folder."""
        try:
            with os.scandir(self.folder) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError:  # the folder is gone, or not there yet
            entries = []
        self._look_at_records([entry for entry in entries if entry.name.endswith(".json")])
        parts = {entry.name.removesuffix(".part"): entry for entry in entries if entry.name.endswith(".part")}
        for name in [name for name in self.runs if name not in parts]:
            del self.runs[name]
            self._states.pop(name, None)
        for name, entry in parts.items():
            if name not in self.runs and entry.is_dir(follow_symlinks=False):
                self.runs[name] = LinesReader(Path(entry.path) / FILE)
        for run in self.runs.values():
            run.update()

    def _look_at_records(self, entries: Sequence[os.DirEntry[str]]) -> None:
        known, self.records = self.records, {}
        for entry in entries:
            try:
                found = entry.stat()
            except OSError:
                continue
            seen = found.st_size, found.st_mtime_ns, found.st_ino
            before = known.get(entry.name)
            self.records[entry.name] = before if before and before[0] == seen else (seen, _load(Path(entry.path)))

    def record_file(self, name: str) -> Path | None:
        """Return the file of a record with this name; None if the folder has none."""
        known: Mapping[str, tuple[Seen, Record | str]] = self.records
        return self.folder / name if name in known and isinstance(known[name][1], Record) else None


def _load(path: Path) -> Record | str:
    """Return a record, or why the file is none."""
    try:
        return Record.load(path)
    except ValueError as error:
        return shorten(printable(error), 300)
