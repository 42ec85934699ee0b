"""What a driver of runs writes down for `hatrack status`: which runs it has, and where each of them stands."""

import json
import os
import platform
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from filelock import FileLock

from hatrack.clusters.shared_folder import is_held
from hatrack.files.atomic import read_bytes, write

JOBS = "jobs"  # the folder of plans and of Slurm's files, within that of the records
LEFT = "left"  # the state of a run that another process has: its own plan, lock and files tell more
EVERY, PAGE = 5.0, 30.0  # seconds between two writes of the plan, and of the page


class Plan:
    """The plan of one command, in a file that is written every few seconds and at its end.

    Args:
        out: the folder of the records.
        engine: what carries out the runs, such as "ray".
        names: all runs of the command.
        page: writes a page of it, every half minute and at the end.
    """

    def __init__(self, out: Path, engine: str, names: Iterable[str], page: Callable[[Path], Any] = lambda out: None) -> None:
        self.out, self.page, self.shown = out, page, 0.0
        self.path = out / JOBS / f"{engine}-{platform.node() or 'here'}-{os.getpid()}.plan"
        self.lock = FileLock(self.path.with_suffix(".lock"))
        self.runs: dict[str, dict[str, Any]] = {name: {"state": "waiting"} for name in names}
        self.about: dict[str, Any] = {"engine": engine, "host": platform.node(), "began": time.time(), "ended": None}
        self.written, self.changed = 0.0, True

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.lock.acquire()  # whoever reads the plan sees by it that the driver lives
        self._write()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            Path(self.lock.lock_file).unlink(missing_ok=True)
        self.lock.release()

    def note(self, name: str, state: str, **more: Any) -> None:
        """Note the state of a run, and what else is known of it."""
        self.runs[name] = {**self.runs.get(name, {}), **{k: v for k, v in more.items() if v != ""}, "state": state}
        self.changed = True

    def keep(self) -> None:
        """Write the plan if it has changed and the last write is some seconds ago."""
        if self.changed and time.monotonic() - self.written >= EVERY:
            self._write()
            self._show()

    def end(self, stopped: bool) -> None:
        """Write the plan for the last time."""
        for run in self.runs.values():
            if run["state"] in ("queued", "running", "waiting"):
                run["state"] = "stopped" if stopped or run["state"] == "running" else "waiting"
        self.about["ended"] = time.time()
        self._write()
        self._show(now=True)

    def _show(self, *, now: bool = False) -> None:
        if now or time.monotonic() - self.shown >= PAGE:
            with suppress(OSError, ValueError):  # nor must a page
                self.page(self.out)
            self.shown = time.monotonic()

    def _write(self) -> None:
        with suppress(OSError):  # a plan that can't be written must not end the runs
            write(self.path, json.dumps({**self.about, "runs": self.runs}), follow=False)
        self.written, self.changed = time.monotonic(), False


def read_plans(out: Path) -> list[dict[str, Any]]:
    """Return the plans in a folder of records, the oldest first; `alive` says whether the driver of each still lives."""
    found = []
    for path in (out / JOBS).glob("*.plan"):
        with suppress(ValueError, RecursionError):
            plan = json.loads(read_bytes(path, most=None))
            if isinstance(plan, dict) and isinstance(plan.get("runs"), dict):
                found.append({**plan, "alive": plan.get("ended") is None and is_held(path.with_suffix(".lock"))})
    return sorted(found, key=lambda plan: float(plan.get("began") or 0))
