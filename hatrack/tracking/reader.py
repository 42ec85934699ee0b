"""Reads the file of a run's lines while it grows: only what is new since the last look."""

import os
import stat
from pathlib import Path

from hatrack.tracking.lines import RunLines, parse

FILE = "epochs.jsonl"  # in the folder NAME.part of a run
MOST = 2**28  # bytes that are read of one file
BEGINNING = 200  # bytes by which another file with the same name is noticed


class LinesReader:
    """The lines of one file, which a process may be writing.

    Args:
        path: the file; it need not be there yet.

    Attributes:
        lines: what was read so far.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.lines = path, RunLines()
        self._read, self._rest, self._beginning, self._seen = 0, b"", b"", (0, 0, 0)

    def update(self) -> bool:
        """Read what is new.

        Returns:
            Whether anything is.
        """
        try:
            found = os.lstat(self.path)
            seen = found.st_size, found.st_mtime_ns, found.st_ino
            if seen == self._seen or not stat.S_ISREG(found.st_mode):  # to read a pipe may never end
                return False
            with self.path.open("rb") as file:
                if found.st_size < self._read or file.read(len(self._beginning)) != self._beginning:
                    self._start_anew()  # the run was begun anew
                file.seek(self._read)
                new = file.read(max(0, MOST - self._read))
        except OSError:
            return False
        self._seen = seen
        self._beginning = self._beginning or new[:BEGINNING]
        self._read += len(new)
        return self._take(new)

    def _start_anew(self) -> None:
        self.lines, self._read, self._rest, self._beginning = RunLines(), 0, b"", b""

    def _take(self, new: bytes) -> bool:
        *whole, self._rest = (self._rest + new).split(b"\n")  # the last line may be half written
        found = [line for text in whole if (line := parse(text)) is not None]
        for line in found:
            self.lines.add(line)
        return bool(found)
