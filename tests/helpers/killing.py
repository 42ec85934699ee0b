"""Runs that are killed at a chosen moment, and whether two records are the same."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

from hatrack import Record, Regime, Run, run
from hatrack.__main__ import main
from hatrack.training.checkpoint import Checkpointer

SAME = (
    "spec",
    "tasks",
    "parameters",
    "before",
    "accuracy",
    "loss",
    "train_loss",
    "valid_accuracy",
    "valid_loss",
    "without_task_id",
    "curves",
    "usage",
)


OFTEN = 0.0  # minutes: at every step


class Killed(BaseException):
    """Nobody catches it, as nobody catches a kill."""


def spec(method: str, seed: int = 0, **regime: object) -> Run:
    return Run(
        "smnist",
        method,
        seed,
        benchmark_options={"data": "sample"},
        network_options={"widths": (12, 12), "input_dropout": 0.0},  # that of 784 pixels would take half of the time
        train_examples=100,
        regime=Regime(**{"epochs": 2, "batch": 250, "optimizer": "adam", "lr": 0.003, "keep_state": True, **regime}),
    )


def killed_at(monkeypatch, chance: float, seed: int, most: int):
    """Every step may be the last; `most` kills in all."""
    draw, tick, kills = random.Random(seed), Checkpointer.after_step, []

    def deadly(self, course):
        tick(self, course)
        if len(kills) < most and draw.random() < chance:
            kills.append(course.step_index)
            raise Killed

    monkeypatch.setattr(Checkpointer, "after_step", deadly)
    return kills


def to_the_end(one: Run, out: Path, **how: object) -> Record:
    while True:
        try:
            return run(one, out, **how)
        except Killed:
            continue


def assert_same(one: Record, two: Record) -> None:
    for name in SAME:
        assert getattr(one, name) == getattr(two, name), name


WORDS = ("--data", "sample", "--widths", "12,12", "--epochs", "12", "--batch", "50", "--patience", "100", "--device", "cpu")


def start(out: Path, *words: str) -> subprocess.Popen[str]:
    """In a process group of its own, as a terminal does it."""
    command = [sys.executable, "-m", "hatrack", "run", "smnist", "hat", *WORDS, "--out", str(out), *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True
    )


def here(out: Path, *words: str) -> list[Record]:
    """The same command in this process, to its end."""
    assert main(["run", "smnist", "hat", *WORDS, "--out", str(out), *words]) == 0
    return [Record.load(path) for path in sorted(out.glob("*.json"))]


def wait_for(out: Path, files: str, runs: int = 1) -> None:
    """Until so many runs have saved such states."""
    until = time.monotonic() + 60
    while len({path.parent for path in out.glob(f"*.part/{files}-*.safetensors")}) < runs:
        assert time.monotonic() < until, "no state was saved"
        time.sleep(0.02)


def wait_for_epochs(out: Path, count: int) -> None:
    """Until a run has told of so many epochs. However fast a machine is, it is then in the middle of the run."""
    until = time.monotonic() + 100
    while all(path.read_text().count('"kind":"epoch"') < count for path in out.glob("*.part/epochs.jsonl")):
        assert time.monotonic() < until, f"no run came to epoch {count}"
        time.sleep(0.005)
