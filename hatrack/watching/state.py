"""Where a run stands that has no record yet, read off its lines: for the page while it is watched."""

import os
import socket
import time
from typing import Any

from hatrack.text import duration, is_held, is_percent, printable, shorten
from hatrack.tracking.lines import Line, RunLines
from hatrack.tracking.progress import seconds_left, share_done
from hatrack.tracking.tracker import average, forgetting, layer_title

POINTS = 1000  # of a curve, at most: a screen has no more columns
SILENT = 120.0  # seconds without a line after which a run of another machine is said to be silent
STOPPED = "stopped; `hatrack resume` goes on with it"

UNKNOWN = dict.fromkeys(
    ("benchmark", "method", "seed", "task", "tasks", "task_name", "epoch", "epochs", "seconds", "accuracy", "forgetting")
)


def run_state(name: str, lines: RunLines, points: int = POINTS) -> dict[str, Any]:
    """Return where a run stands, as `hatrack.reporting.page.collect` takes it.

    Args:
        name: the name of the run, which is that of its folder.
        lines: its lines.
        points: how many points its curve may have.

    Returns:
        Plain values; what is not known is None or empty.
    """
    about, last = lines.about, lines.last
    found: dict[str, Any] = {"name": name, "done": share_done(lines)}
    spec = about.get("spec") if isinstance(about.get("spec"), dict) else {}
    found |= {key: spec[key] for key in ("benchmark", "method", "seed") if spec and key in spec}
    found |= {
        "host": about.get("host"),
        "tasks": len(about.get("tasks", [])) or None,
        "score": about.get("score") or "accuracy",
    }
    if last:
        found |= {"task": last["task"] + 1, "epoch": last["epoch"] + 1, "epochs": last["epochs"]}
        found |= {"task_name": _task_name(about, last["task"]), "seconds": last.get("seconds")}
    if lines.scores and is_percent(about.get("score")):
        now = lines.scores[max(lines.scores)]
        found |= {"accuracy": average(now), "forgetting": forgetting(now, lines.scores)}
    found |= {"curve": curve(lines, points), "capacity": capacity_now(lines)}
    return {**UNKNOWN, **found, **status_now(lines, seconds_left(lines))}


def status_now(lines: RunLines, left: float | None) -> dict[str, Any]:
    """Return whether a run goes on now, what there is to say, and how long it will: `left` seconds if it goes on."""
    status, message = _status(lines)
    message = message or _other_score(lines)
    going = left if status == "running" else None
    return {"status": status, "message": message, "left": going}


def _other_score(lines: RunLines) -> str:
    """Return the mean score so far, if it is no share of right answers."""
    score = lines.about.get("score")
    if not lines.scores or is_percent(score):
        return ""
    mean = average(lines.scores[max(lines.scores)])
    return "" if mean is None else f"{score} so far {mean:.3g}"


def _task_name(about: Line, task: int) -> str:
    names = about.get("tasks", [])
    return "pretraining" if task < 0 else printable(names[task]) if task < len(names) else ""


def _status(lines: RunLines) -> tuple[str, str]:
    """Return "running" or "stopped", and a line that says why or since when."""
    if not lines.count:
        return "stopped", "it has no lines: begun by an earlier version, or just now"
    if lines.ended is not None and lines.ended["why"] != "finished":
        why = lines.ended["why"]
        return "stopped", STOPPED if why == "stopped" else shorten(printable(why), 200)
    about = lines.about
    if about.get("host") == socket.gethostname() and not _is_alive(about.get("pid")):
        return "stopped", f"its process is gone; {STOPPED.partition('; ')[2]}"
    silent = time.time() - _last_time(lines)
    if about.get("host") != socket.gethostname() and silent > max(SILENT, 10 * _epoch_seconds(lines)):
        return "running", f"no line for {duration(silent)}"
    return "running", ""


def _is_alive(pid: Any) -> bool:
    """Return whether a process of this machine goes on; True if that is not known."""
    if type(pid) is not int or pid <= 0:
        return True
    try:
        os.kill(pid, 0)  # asks only
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _last_time(lines: RunLines) -> float:
    return float(lines.last.get("time") or lines.about.get("time") or 0.0)


def _epoch_seconds(lines: RunLines) -> float:
    """Return how long the last epoch took; 0 if that is not known."""
    fit = next(reversed(lines.fits.values()), None)
    times = [line["seconds"] for line in (fit.lines[-2:] if fit else []) if line.get("seconds") is not None]
    return float(times[1] - times[0]) if len(times) == 2 else 0.0


def curve(lines: RunLines, points: int = POINTS) -> list[list[float | None]]:
    """Return the curve of a run: for every epoch the number of its task and its own within the task, both from 1, the score
    on validation data and the training loss. A long one is thinned out, without the last epoch of any task."""
    found: list[list[float | None]] = []
    task, epoch, ends = None, 0, set()
    for line in lines.curve():
        if line["task"] != task:
            task, epoch = line["task"], 0
            ends.add(len(found) - 1)
        epoch += 1
        found.append([line["task"] + 1, epoch, line.get("valid_accuracy"), line.get("loss")])
    every = -(-len(found) // points)
    last = len(found) - 1
    return [point for k, point in enumerate(found) if k % every == 0 or k in ends or k == last] if every > 1 else found


def capacity_now(lines: RunLines) -> dict[str, float]:
    """Return the share of every layer that finished tasks use; and of all weights, if that is measured in every epoch."""
    last = lines.tasks[max(lines.tasks)].get("usage", {}) if lines.tasks else {}
    titles = lines.about.get("layers", {})
    shares = {layer_title(name, titles): share for name, share in last.items() if share is not None and not is_held(name)}
    used = lines.last.get("used")
    return {"all weights, with this task": used, **shares} if used is not None else shares
