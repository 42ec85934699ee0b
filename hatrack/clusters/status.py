"""Where the runs of a folder stand: done, running, queued, waiting, stopped or failed, and why. It changes no run."""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from hatrack.clusters.plan import LEFT, read_plans
from hatrack.clusters.shared_folder import is_held
from hatrack.clusters.slurm_queue import QueuedJob, live_runs
from hatrack.experiments.record import Record
from hatrack.experiments.run_folder import RunFolder
from hatrack.files.atomic import write
from hatrack.text import printable, shorten
from hatrack.tracking.lines import RunLines
from hatrack.tracking.progress import share_done, status_text
from hatrack.tracking.reader import LinesReader

STATES = {
    "running": "a process has it",
    "queued": "an engine has it, and no place for it yet",
    "waiting": "a command that is running has not handed it over yet",
    "stopped": "it goes on with the command that began it, or with hatrack resume",
    "failed": "it has no record, or none that can be read, for the reason that is told",
    "done": "it has its record",
}
REFRESH = 10  # seconds after which a browser reads the page again


class RunStatus(NamedTuple):
    """Where a run stands.

    Attributes:
        name: of the run.
        state: a key of STATES.
        share: how much of it is done, from 0 to 1; None if that is not known.
        text: where it is, or why it failed.
    """

    name: str
    state: str
    share: float | None = None
    text: str = ""


def status(folder: Path) -> list[RunStatus]:
    """Return where the runs of a folder stand: by their records, locks and saved states, by what drivers of Ray wrote down,
    and by what Slurm says.

    Args:
        folder: a folder of records.
    """
    plans, slurm = read_plans(folder), live_runs(folder)
    planned: dict[str, dict[str, Any]] = {}
    for plan in plans:
        for name, run in plan["runs"].items():
            if isinstance(run, dict) and run.get("state") != LEFT:
                planned[name] = {**run, "alive": plan["alive"]}
    records = {path.stem for path in folder.glob("*.json")}
    parts = {path.stem for path in folder.glob("*.part")}
    locks = {path.stem for path in folder.glob("*.lock")}
    names = sorted(records | parts | locks | planned.keys() | slurm.keys())
    return [_status_of(RunFolder(folder / f"{name}.part", {}), planned.get(name, {}), slurm.get(name)) for name in names]


def _status_of(folder: RunFolder, planned: dict[str, Any], job: QueuedJob | None) -> RunStatus:
    """Return where one run stands. What lies in the folder counts more than what somebody wrote about it."""
    name, said, alive = folder.path.stem, str(planned.get("state", "")), bool(planned.get("alive"))
    share = planned.get("share") if isinstance(planned.get("share"), int | float) else None
    node = f"node {planned['node'][:8]}" if isinstance(planned.get("node"), str) and planned["node"] else ""
    again = f"attempt {planned['attempts']}" if planned.get("attempts") not in (None, 1) else ""
    where = ", ".join(filter(None, [printable(planned.get("line", "")), node, again]))
    if folder.done:
        return _of_record(folder)
    if alive and said in ("running", "queued", "waiting"):
        return RunStatus(name, said, share if said == "running" else None, where if said == "running" else "")
    lines = _lines(folder)
    done, stands = (share_done(lines), status_text(lines)) if lines.count else (share, "")
    if job is not None:
        locked = _is_held(folder)
        text = f"job {job.job}" + (f", {job.why}" if job.why else "")
        return RunStatus(name, "running" if locked else job.state, done, ", ".join(filter(None, [text, stands])))
    if _is_held(folder):
        return RunStatus(name, "running", done, stands or "a process has its lock")
    if why := folder.failure() or (printable(planned.get("why", "")) if said == "failed" else ""):
        return RunStatus(name, "failed", None, why)
    if folder.files():
        return RunStatus(name, "stopped", done, stands or "saved")
    return RunStatus(name, "stopped", None, "nothing of it was saved")


def _of_record(folder: RunFolder) -> RunStatus:
    """Return that a run is done; or why its record can't be read."""
    try:
        found = folder.record.stat()
        damage = _damage(folder.record, found.st_size, found.st_mtime_ns)
    except OSError as error:
        damage = printable(error)
    return RunStatus(folder.path.stem, "failed", None, damage) if damage else RunStatus(folder.path.stem, "done", 1.0)


@lru_cache(maxsize=10_000)  # drivers of fleets ask again and again
def _damage(path: Path, size: int, time: int) -> str:
    """Return why a file of this size and time is no record; empty if it is one."""
    try:
        Record.load(path)
    except ValueError as error:
        return shorten(printable(error).replace(f"{path} ", f"{path.name} "), 200)
    return ""


def _lines(folder: RunFolder) -> RunLines:
    """Return what a run wrote about its epochs so far."""
    reader = LinesReader(folder.lines)
    reader.update()
    return reader.lines


def _is_held(folder: RunFolder) -> bool:
    """Whether a process has a run."""
    return is_held(Path(folder.lock.lock_file))


def summary(found: Sequence[RunStatus]) -> str:
    """Return how many runs are in each state, in one line."""
    counts = Counter(run.state for run in found)
    return ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state]) or "no runs"


def write_page(folder: Path) -> Path:
    """Write status.html into a folder of records and return its path; a browser that shows it reads it again by itself."""
    path = folder / "status.html"
    write(path, status_page(status(folder), f"Runs in {folder}"))
    return path


def status_page(found: Sequence[RunStatus], title: str) -> str:
    """Return a page with the state of every run, which a browser reads again every few seconds.

    Args:
        found: where the runs stand.
        title: of the page.
    """
    rows = "\n".join(
        f"<tr><td>{escape(printable(run.name))}</td><td class={run.state}>{run.state}</td>"
        f"<td><progress max=1 value={run.share or 0:.3f}></progress></td><td>{escape(printable(run.text))}</td></tr>"
        for run in sorted(found, key=lambda run: (list(STATES).index(run.state), run.name))
    )
    style = (
        ":root{color-scheme:light dark} body{font:15px sans-serif;margin:2em} td{padding:2px 1em 2px 0}"
        " .failed{color:light-dark(#b00,#ff8a80)} .done{color:light-dark(#070,#7fd18b)}"
        " progress{width:5rem} td{overflow-wrap:anywhere;vertical-align:top}"
        " @media(max-width:640px){body{margin:1rem}tr,td{display:block;padding:.1rem 0}tr{margin-bottom:1rem}}"
    )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<meta http-equiv=refresh content={REFRESH}>"
        f"<title>{escape(printable(title))}</title><style>{style}</style>"
        f"<h1>{escape(printable(title))}</h1><p>{escape(summary(found))}</p><table>\n{rows}\n</table>\n"
    )
