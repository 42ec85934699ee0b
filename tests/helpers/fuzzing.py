"""Folders with every kind of file that hatrack reads, and a runner of commands with limits of time and memory."""

import contextlib
import hashlib
import io
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from hatrack import Record, Regime, Trainer
from hatrack.__main__ import main
from hatrack.training.checkpoint import Checkpointer
from hatrack.training.saving import save
from tests.helpers import mutations
from tests.helpers.killing import SAME, Killed
from tests.helpers.learning import make
from tests.helpers.toys import toy_tasks

SECONDS = 20  # the most that one case may take
MEMORY = 1 << 30  # bytes, the most that one case may take
SHORT = ["--widths", "10", "--epochs", "2", "--batch", "4", "--valid", "0.2", "--device", "cpu"]
RUN = ["--tasks", "tasks.toml", *SHORT, "--out", "runs"]


class Hang(BaseException):
    """Raised when a case takes too long; a BaseException, so that no `except Exception` hides it."""


class Outcome(NamedTuple):
    """What a command did: its exit code, its standard output and its standard error."""

    code: int
    said: str
    error: str


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Raise Hang after SECONDS, and MemoryError beyond MEMORY bytes."""

    def late(number: int, frame: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    with memory():
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def memory() -> Iterator[None]:
    """Limit the memory that can be allocated, on Linux."""
    if sys.platform != "linux":
        yield
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    old = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)


def program(*words: str) -> Outcome:
    """Run a command as a user does; unexpected exceptions are not caught."""
    out, err = io.StringIO(), io.StringIO()
    with limits(), warnings.catch_warnings(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        warnings.simplefilter("always", UserWarning)  # a user sees them; pytest makes all other warnings errors
        code = main(words)
    return Outcome(code, out.getvalue(), err.getvalue())


def contents(root: Path) -> dict[str, str]:
    """Return the digest of every file, by its path within the folder."""
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def own(root: Path) -> None:
    """Write the files of a benchmark `own` with two tasks."""
    for number in range(2):
        draw = np.random.RandomState(number)
        arrays = {
            "x_train": draw.randint(0, 256, (16, 6, 6), dtype=np.uint8),
            "y_train": np.arange(16, dtype=np.uint8) % 2,
            "x_test": draw.randint(0, 256, (4, 6, 6), dtype=np.uint8),
            "y_test": np.arange(4, dtype=np.uint8) % 2,
        }
        np.savez(root / f"task{number}.npz", **arrays)
    (root / "tasks.toml").write_text(mutations.toml(OWN))


OWN: dict[str, Any] = {
    "shape": [1, 6, 6],
    "task": [
        {"name": "one", "data": "task0.npz", "classes": 2, "mean": [0.5], "std": 0.25},
        {"name": "two", "data": "task1.npz"},
    ],
}


def finished(root: Path) -> None:
    """Write a finished run to runs/."""
    own(root)
    assert program("run", "own", "sgd", *RUN).code == 0


def killed(*words: str, after: int) -> None:
    """Run a command and kill it in the second task, after some steps of it."""
    after_step, steps = Checkpointer.after_step, []

    def killing(self: Checkpointer, loop: Any) -> None:
        after_step(self, loop)
        steps.append(loop.task.index)
        if steps.count(1) == after:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpointer, "after_step", killing)
        with pytest.raises(Killed):
            program(*words)


def stopped(root: Path) -> None:
    """Write to runs/ a run that was killed in its second task, with checkpoints, and to whole/ the same run finished."""
    own(root)
    assert program("run", "own", "hat", *RUN[:-1], "whole").code == 0
    killed("run", "own", "hat", *RUN, "--save-every", "0.00001", after=6)
    assert len(list(root.glob("runs/*.part/*.safetensors"))) == 4


def results(path: Path) -> dict[str, Any]:
    """Return the fields of a record that do not depend on time and machine."""
    return {name: getattr(Record.load(path), name) for name in SAME}


def model(root: Path) -> None:
    """Write a saved method to model.safetensors."""
    tasks = toy_tasks(2)
    method = make("hat", tasks)
    for task in tasks:
        method.learn(task, Trainer(Regime(epochs=1, batch=30)))
    save(method, root / "model.safetensors")


def files(make: Callable[[], dict[str, bytes]]) -> Callable[[Path], None]:
    """Return a function that writes these files to copies/."""

    def build(root: Path) -> None:
        (root / "copies").mkdir()
        for name, data in make().items():
            (root / "copies" / name).write_bytes(data)

    return build


Build = Callable[[Path], None]


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Build], Path]:
    """Return a function that returns the undamaged folder that `build` writes; each is built once."""
    made: dict[Build, Path] = {}

    def tree(build: Build) -> Path:
        if build not in made:
            made[build] = tmp_path_factory.mktemp("pristine")
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(made[build])
                patch.setenv("HATRACK_DATA", str(made[build] / "data"))
                build(made[build])
        return made[build]

    return tree
