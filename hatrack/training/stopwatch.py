"""Where the time of a run goes: the seconds of its parts."""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

OTHER = "other"


class Stopwatch:
    """Adds up the seconds of parts by name. A part within another one counts for itself alone, not for the outer one.

    Example:
        >>> watch = Stopwatch()
        >>> with watch("steps"):
        ...     loop.train_epoch(0)
        >>> watch.seconds()
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._parts, self._mark, self._known = [OTHER], time.perf_counter(), True

    def _lap(self) -> None:
        now = time.perf_counter()
        self._seconds[self._parts[-1]] += now - self._mark
        self._mark = now

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Count the time within the block for a part."""
        self._lap()
        self._parts.append(part)
        try:
            yield
        finally:
            self._lap()
            self._parts.pop()

    def go_on_from(self, before: Mapping[str, float] | None) -> None:
        """Add the seconds of the parts before, of a run that is continued. None: they are not known, nor then is the sum."""
        self._known &= before is not None
        for part, seconds in (before or {}).items():
            self._seconds[part] += seconds

    def seconds(self) -> dict[str, float] | None:
        """Return the seconds of every part so far, and under "other" those of no part; None if they are not known."""
        self._lap()
        return dict(self._seconds) if self._known else None
