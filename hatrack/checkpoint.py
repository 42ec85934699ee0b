"""A run that is killed goes on to the same bits: what it needs for that, in files that are whole or not there.

In the folder NAME.part lie task-T (the state in which task T began, and what was measured before it) and fit-T-N-0 and -1
(the N-th fit of that task: the last two states of it, or its end). On resume `learn` is called again on the state in which
the task began; a fit that had ended returns at once, the one under way goes on from its last save.
"""

import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

import hatrack
from hatrack import tensors

if TYPE_CHECKING:
    from hatrack.course import Course
    from hatrack.method import Method
    from hatrack.trainer import Trainer

FORMAT = 1
State = tuple[dict[str, Tensor], dict[str, Any]]
stopping = threading.Event()  # somebody wants the program to end: save and stop


class Stopped(Exception):  # noqa: N818
    """The run was asked to stop, and saved where it stands."""


class Journal:
    """The saved states of one run. `with journal:` keeps other processes out of it."""

    def __init__(self, folder: Path, spec: dict[str, Any], *, minutes: float = 5.0) -> None:
        self.folder, self.spec, self.seconds = folder, spec, 60 * minutes
        self.lock = FileLock(folder.with_suffix(".lock"))
        self.task, self.fit, self.saves = 0, -1, 0
        self.last = time.monotonic()
        self.notes: list[str] = []  # what was wrong with files that were passed over

    def __enter__(self) -> "Journal":
        try:
            self.lock.acquire(timeout=0)  # the system frees it when a process dies
        except Timeout:
            raise ValueError(f"{self.folder.stem} is being run by another process") from None
        return self

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    # Tasks

    def begin(self, task: int, method: "Method", trainer: "Trainer", rows: dict[str, Any]) -> None:
        """A task begins: its first state, and all that was measured so far."""
        self.task, self.fit = task, -1
        kept = {f"method/{key}": value for key, value in method.state_dict().items()}
        words = {"task": task, "rows": rows, "history": list(method.history.items()), **trainer.remembered(method, kept)}
        self._write(self._task_file(task), kept, words)
        for file in self.folder.glob("*.safetensors"):  # of this task and the one before, the beginnings stay
            if file not in (self._task_file(task), self._task_file(task - 1)):
                file.unlink()

    def resume(self, method: "Method", trainer: "Trainer") -> dict[str, Any] | None:
        """Back to the beginning of the task that was under way; what was measured before it, or None if there is nothing."""
        files = sorted(self.folder.glob("task-*.safetensors"), key=lambda file: int(file.stem.split("-")[1]), reverse=True)
        for file in files:
            state = self._read(file)
            if state is None:
                continue
            kept, words = state
            method.load_state_dict({key.removeprefix("method/"): v for key, v in kept.items() if key.startswith("method/")})
            trainer.recall(method, kept, words)
            method.history = dict(words["history"])
            self.task, self.fit = words["task"], -1
            return {"task": self.task, **words["rows"]}
        if files:
            raise ValueError(f"{self.folder} holds no state that can be used: {'; '.join(self.notes)}")
        return None

    def remove(self) -> None:
        """The run has its record."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.lock.release()
        Path(self.lock.lock_file).unlink(missing_ok=True)

    # Fits

    def next_fit(self) -> State | None:
        """The next fit of the task begins: where it stood, if it was saved."""
        self.fit += 1
        found = [state for k in (0, 1) if self._fit_file(k).exists() and (state := self._read(self._fit_file(k)))]
        latest = max(found, key=lambda state: int(state[1]["saves"]), default=None)
        self.saves = int(latest[1]["saves"]) if latest else 0
        return latest

    def keep(self, course: "Course", *, ended: bool = False) -> None:
        """Save a fit in place of the last but one state of it."""
        kept, words = course.state()
        self.saves += 1
        self._write(self._fit_file(self.saves % 2), kept, {**words, "saves": self.saves, "ended": ended})
        if ended:  # a later state than this there is not
            self._fit_file((self.saves + 1) % 2).unlink(missing_ok=True)
        self.last = time.monotonic()

    def tick(self, course: "Course") -> None:
        """After every step: save if it is time to."""
        if stopping.is_set():
            self.keep(course)
            where = f"task {course.task.name!r}, epoch {len(course.fitted.epochs) + 1}"
            raise Stopped(f"stopped in {where}, and saved; the same command goes on from there")
        if time.monotonic() - self.last > self.seconds:
            self.keep(course)

    # Files

    def _task_file(self, task: int) -> Path:
        return self.folder / f"task-{task}.safetensors"

    def _fit_file(self, parity: int) -> Path:
        return self.folder / f"fit-{self.task}-{self.fit}-{parity}.safetensors"

    def _write(self, path: Path, kept: dict[str, Tensor], words: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        about = {"format": FORMAT, "hatrack": hatrack.__version__, "spec": self.spec}
        try:
            tensors.save(path, kept, {**about, **words})
        except OSError as error:
            raise ValueError(f"can't save to {path}: {error.strerror}; what was saved before is still there") from None

    def _read(self, path: Path) -> State | None:
        """A state, or None with a note if it can't be used; an older one may."""
        try:
            kept, words = tensors.load(path)
        except ValueError as error:
            self.notes.append(str(error))
            return None
        if not isinstance(words.get("format"), int) or words["format"] > FORMAT:
            raise ValueError(f"{path} is of format {words.get('format')}, newer than this version can read")
        if words.get("spec") != self.spec:
            raise ValueError(f"{path} belongs to another run")
        return kept, words


def unfinished(folder: Path) -> list[dict[str, Any]]:
    """The specifications of the runs in a folder that were stopped before their end."""
    found = []
    for part in sorted(folder.glob("*.part")):
        for file in sorted(part.glob("task-*.safetensors"), reverse=True):
            try:
                found.append(dict(tensors.load(file)[1]["spec"]))
                break
            except (ValueError, KeyError, TypeError):
                continue
    return found


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Of torch's global generators, as tensors."""
    state = {"random/cpu": torch.get_rng_state()}
    return state | ({"random/cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_state(kept: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(kept["random/cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(kept["random/cuda"], device)
