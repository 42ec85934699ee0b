"""Trackers by name, for `--log` and for the argument `log` of `Trainer` and `run`."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hatrack.options import choose
from hatrack.tracking.lines import Line
from hatrack.tracking.tensorboard import TensorBoard
from hatrack.tracking.tracker import Listener, Tracker
from hatrack.tracking.weights_and_biases import WandB

TRACKERS = {name: name for name in ("tensorboard", "wandb")}
Log = str | Tracker | Callable[[Line], object]
PARTS = ("begin", "add", "end")  # of a tracker


def make_trackers(log: Log | Sequence[Log] | None, folder: Path | None = None, name: str = "") -> list[Tracker]:
    """Return the trackers that an argument `log` stands for.

    Args:
        log: "tensorboard", "wandb", a tracker, a function that is called with every line, or a list of these; None: none.
        folder: where trackers keep their files; by default in the working folder.
        name: the name of the run; by default the time.

    Raises:
        ValueError: it is none of these, or the package of a tracker is not installed.
    """
    given = [] if log is None else list(log) if isinstance(log, list | tuple) else [log]
    return [_make(one, folder or Path(), name or time.strftime("%Y-%m-%d-%H-%M-%S")) for one in given]


def _make(log: Any, folder: Path, name: str) -> Tracker:
    if isinstance(log, str):
        if choose("log", log, TRACKERS) == "tensorboard":
            return TensorBoard(folder / "tensorboard" / name)
        return WandB(folder=folder, name=name)
    if all(callable(getattr(log, part, None)) for part in PARTS) and not isinstance(log, type):
        found: Tracker = log
        return found
    if callable(log) and not isinstance(log, type):
        return Listener(log)
    raise ValueError(f"log must be 'tensorboard', 'wandb', a tracker, a function of a line or a list of them, not {log!r}")
