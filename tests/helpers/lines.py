"""Invented lines of runs, in folders as runs write them."""

import os
import socket
import time
from pathlib import Path

from hatrack.tracking.lines import to_text
from hatrack.tracking.reader import FILE


def about(tasks=3, **more):
    spec = {"benchmark": "smnist", "method": "hat", "seed": 2}
    line = {"kind": "run", "id": "ab", "tasks": [f"task {k}" for k in range(tasks)], "spec": spec, "time": time.time()}
    return line | {"pid": os.getpid(), "host": socket.gethostname()} | more


def epoch(task, number, accuracy=0.5, **more):
    line = {"kind": "epoch", "task": task, "fit": 0, "halved": 0, "epoch": number, "epochs": 10, "lr": 0.1, "loss": 1.0}
    return line | {"valid_loss": 1.0, "valid_accuracy": accuracy, "seconds": 10.0 * (number + 1), "time": time.time()} | more


def write(folder: Path, name: str, *lines):
    (folder / f"{name}.part").mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.part" / FILE).open("ab") as file:
        file.write(b"".join(to_text(line).encode() + b"\n" for line in lines))


def learned(task, accuracy, **usage):
    return [{"kind": "task", "task": task, "usage": usage}, {"kind": "scores", "task": task, "accuracy": accuracy}]
