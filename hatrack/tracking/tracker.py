"""What takes the lines of a run: the contract of trackers, and the numbers that they log."""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Protocol

from hatrack.text import is_held
from hatrack.tracking.lines import Line, RunLines


class Tracker(Protocol):
    """Takes the lines of a run, such as `TensorBoard` or `WandB`. A log calls it in the thread of the run."""

    def begin(self, lines: RunLines) -> None:
        """Begin with what processes before have written; `lines.about` says what is run."""

    def add(self, line: Line, lines: RunLines) -> None:
        """Take a line, which is in `lines` already."""

    def end(self) -> None:
        """Finish: no further line will come."""


class Listener:
    """A tracker that calls a function with every line, first with those of processes before.

    Args:
        function: what is called with each line.
    """

    def __init__(self, function: Callable[[Line], object]) -> None:
        self.function = function

    def __repr__(self) -> str:
        return f"log={self.function!r}"

    def begin(self, lines: RunLines) -> None:
        """Call the function with all lines that hold; the line of the run comes last."""
        for line in lines.all():
            self.function(deepcopy(line))  # a function may change what it is given

    def add(self, line: Line, lines: RunLines) -> None:
        """Call the function with a line."""
        self.function(deepcopy(line))

    def end(self) -> None:
        """Do nothing."""


def scalars(line: Line, lines: RunLines) -> dict[str, float]:
    """Return the numbers of a line that are logged, by the name of their curve.

    Args:
        line: a line of an epoch, of a task, or of test accuracies.
        lines: all lines of the run.
    """
    if line["kind"] == "epoch":
        named = {"lr": "lr", "loss": "loss/training", "valid_loss": "loss/validation", "valid_accuracy": "score/validation"}
        named |= {"used": "capacity/weights"}
        found = {name: line.get(key) for key, name in named.items()} | {"task": line["task"] + 1}
        found |= {f"watched/{name}": v for name, v in _by_task(line.get("watched", []), lines).items()}
    elif line["kind"] == "task":
        usage = {name: share for name, share in line.get("usage", {}).items() if not is_held(name)}
        found = {f"capacity/{layer_title(name, lines.about.get('layers', {}))}": share for name, share in usage.items()}
    elif line["kind"] == "scores":
        found = {f"test/{name}": v for name, v in _by_task(line["accuracy"][: line["task"] + 1], lines).items()}
        found |= {"score/average": average(line), "score/forgetting": forgetting(line, lines.scores)}
    else:
        return {}
    return {name: float(v) for name, v in found.items() if v is not None and math.isfinite(v)}


def _by_task(values: Sequence[float | None], lines: RunLines) -> dict[str, float | None]:
    """Return values by the names of their tasks; tasks of the same name have their numbers behind it."""
    names = lines.about.get("tasks", [])
    found: dict[str, float | None] = {}
    for number, value in enumerate(values):
        name = names[number] if number < len(names) else f"task {number + 1}"
        found[name if name not in found else f"{name} ({number + 1})"] = value
    return found


def layer_title(name: str, titles: Mapping[str, str]) -> str:
    """Return the name of a layer for people, "linear 1, 50 units" for example; its own if there is no other.

    Args:
        name: a name in `usage`: that of a layer, or of its weights, perhaps with "trunk." before it.
        titles: names for people by those of layers, which the line of a run has as "layers".
    """
    short = name.removeprefix("trunk.")
    return titles.get(short) or titles.get(short.removesuffix(".weight")) or name


def average(line: Line) -> float | None:
    """Return the mean accuracy over the tasks learned so far, from a line of test accuracies."""
    known = line["accuracy"][: line["task"] + 1]
    return None if not known or None in known else sum(known) / len(known)


def forgetting(line: Line, before: Mapping[int, Line]) -> float | None:
    """Return the forgetting after a task: the mean drop from the best accuracy of each earlier task since it was learned.

    Args:
        line: the test accuracies after the task.
        before: the lines of the tasks before it, by number.

    Returns:
        The mean; 0 for the first task; None if an accuracy is not known.
    """
    now, drops = line["task"], []
    for task in range(now):
        past = [before[later]["accuracy"][task : task + 1] for later in range(task, now) if later in before]
        values = [value for row in past for value in row]
        if len(line["accuracy"]) <= task or len(values) < now - task or None in (*values, line["accuracy"][task]):
            return None
        drops.append(max(values) - line["accuracy"][task])
    return sum(drops) / len(drops) if drops else 0.0
