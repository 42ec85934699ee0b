"""A run that is killed goes on to the same bits: what it needs for that, in files that are whole or not there.

In the folder NAME.part lie task-T (the state in which task T began, and what was measured before it) and fit-T-N-0 and -1
(the N-th fit of that task: the last two states of it, or its end). On resume `learn` is called again on the state in which
the task began; a fit that had ended returns at once, the one under way goes on from its last save. A file `again` there says
that the run is to replace the record that it has.
"""

import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from hatrack._version import __version__
from hatrack.files import tensors
from hatrack.files.atomic import flush_names, write
from hatrack.training import checkpoint_schema as states

if TYPE_CHECKING:
    from hatrack.methods.method import Method
    from hatrack.training.fit_loop import Course
    from hatrack.training.trainer import Trainer

FORMAT = 2
AGAIN = "again"
State = tuple[dict[str, Tensor], dict[str, Any]]
stopping = threading.Event()  # somebody wants the program to end: save and stop


class Stopped(Exception):  # noqa: N818
    """The run was asked to stop, and saved where it stands."""


class Journal:
    """The saved states of one run. `with journal:` keeps other processes out of it."""

    def __init__(self, folder: Path, spec: dict[str, Any], *, minutes: float = 5.0) -> None:
        if not minutes >= 0:
            raise ValueError(f"--save-every must be at least 0 minutes, not {minutes:g}")
        self.folder, self.spec, self.seconds = folder, spec, 60 * minutes
        self.record = folder.with_suffix(".json")
        self.lock = FileLock(folder.with_suffix(".lock"))
        self.task, self.fit, self.saves = 0, -1, 0
        self.last = time.monotonic()
        self.notes: list[str] = []  # what was wrong with files that were passed over

    def __enter__(self) -> "Journal":
        place = self.folder.parent
        try:
            place.mkdir(parents=True, exist_ok=True)
            self.lock.acquire(timeout=0)  # the system frees it when a process dies
        except Timeout:
            raise ValueError(f"{self.folder.stem} is being run by another process") from None
        except OSError as error:
            raise ValueError(f"can't write to the folder {place}: {error.strerror}") from None
        for name in (self.folder / ".*", self.record.with_name(f".{escape(self.record.name)}.*")):
            for file in name.parent.glob(name.name):
                with suppress(OSError):
                    file.unlink()  # half written when a process was killed
        return self

    def __exit__(self, *_: object) -> None:
        if not self.folder.exists():
            with suppress(OSError):  # where an open file can't be removed, the lock does it by itself
                Path(self.lock.lock_file).unlink(missing_ok=True)
        self.lock.release()

    # The whole run

    @property
    def done(self) -> bool:
        """The run has its record, and is not to be run again."""
        return self.record.exists() and not (self.folder / AGAIN).exists()

    @property
    def blocked(self) -> str:
        """Why nothing can be done with it now: another process has it, or nothing can be written. Empty if all is well."""
        try:
            with self:
                return ""
        except ValueError as error:
            return str(error)

    def start_anew(self) -> None:
        """What was saved is dropped, and a record will be replaced; unless that was said before and the run is under way."""
        if not (self.folder / AGAIN).exists():
            shutil.rmtree(self.folder, ignore_errors=True)
            self._make_folder()
            write(self.folder / AGAIN, json.dumps(self.spec))

    def remove(self) -> None:
        """The run has its record."""
        (self.folder / AGAIN).unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def tidy(self) -> None:
        """Remove what is left of a run that was killed when it had its record, unless somebody works on it."""
        if self.folder.exists() or Path(self.lock.lock_file).exists():
            with suppress(ValueError, OSError), self:
                if self.done:
                    self.remove()

    # Tasks

    def begin(self, task: int, method: "Method", trainer: "Trainer", rows: dict[str, Any]) -> None:
        """A task begins: its first state, and all that was measured so far."""
        self.task, self.fit = task, -1
        kept = {f"method/{key}": value for key, value in method.state_dict().items()}
        words = {"task": task, "rows": rows, "history": list(method.history.items()), **trainer.remembered(method, kept)}
        self._write(self._task_file(task), kept, words)
        self.last = time.monotonic()
        for file in self.folder.glob("*.safetensors"):  # of this task and the one before, the beginnings stay
            if file not in (self._task_file(task), self._task_file(task - 1)):
                file.unlink()

    def resume(self, method: "Method", trainer: "Trainer") -> dict[str, Any] | None:
        """Back to the beginning of the task that was under way; what was measured before it, or None if there is nothing."""
        files = [file for file in self.folder.glob("task-*.safetensors") if file.stem.split("-", 1)[1].isdecimal()]
        files.sort(key=lambda file: int(file.stem.split("-")[1]), reverse=True)
        for file in files:
            state = self._read(file)
            if state is None:
                continue
            kept, words = state
            own = {key.removeprefix("method/"): v for key, v in kept.items() if key.startswith("method/")}
            try:
                method.load_state_dict(own)
            except (RuntimeError, LookupError, AttributeError) as error:
                raise ValueError(f"{file} does not fit the method: {' '.join(str(error).split())}") from None
            trainer.recall(method, kept, words)
            method.history = dict(words["history"])
            self.task, self.fit = words["task"], -1
            return {"task": self.task, **words["rows"]}
        if files:
            raise ValueError(f"{self.folder} holds no state that can be used; remove it to start anew: {self.notes[0]}")
        return None

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
        if ended:  # the best state is in the method now
            spare = ("best/",) if course.regime.keep_state else ("best/", "optimizer/")
            kept = {key: value for key, value in kept.items() if not key.startswith(spare)}
        self.saves += 1
        self._write(self._fit_file(self.saves % 2), kept, {**words, "saves": self.saves, "ended": ended})
        if ended:  # a later state than this there is not
            self._fit_file((self.saves + 1) % 2).unlink(missing_ok=True)
        self.last = time.monotonic()

    def tick(self, course: "Course") -> None:
        """After every step: save if it is time to."""
        if stopping.is_set():
            self.keep(course)
            raise Stopped(f"stopped in task {course.task.name!r}, epoch {len(course.fitted.epochs) + 1}, and saved")
        if time.monotonic() - self.last > self.seconds:
            self.keep(course)

    # Files

    def _task_file(self, task: int) -> Path:
        return self.folder / f"task-{task}.safetensors"

    def _fit_file(self, parity: int) -> Path:
        return self.folder / f"fit-{self.task}-{self.fit}-{parity}.safetensors"

    def _make_folder(self) -> None:
        if not self.folder.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            flush_names(self.folder.parent)

    def _write(self, path: Path, kept: dict[str, Tensor], words: dict[str, Any]) -> None:
        self._make_folder()
        about = {"format": FORMAT, "hatrack": __version__, "spec": self.spec}
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
            raise ValueError(f"{path} is of format {words.get('format')!r}, newer than this version can read")
        if words["format"] < FORMAT:
            self.notes.append(f"{path} is of format {words['format']}, older than this version can read")
            return None
        if words.get("spec") != self.spec:
            raise ValueError(f"{path} belongs to another run")
        try:
            states.check(path.name.split("-")[0], words)
        except ValueError as error:
            self.notes.append(f"{path} is no state of a run: {error}")
            return None
        return kept, words


def unfinished(folder: Path) -> Iterator[Journal]:
    """The runs in a folder that were stopped before their end; each knows its specification, if one can be read.

    A folder NAME.part is one run.
    """
    for part in [folder] if folder.suffix == ".part" else sorted(folder.glob("*.part")):
        files = [*part.glob("task-*.safetensors"), *part.glob(AGAIN)]
        spec = next((spec for file in files if (spec := _spec_in(file))), {})
        if files and not (journal := Journal(part, spec)).done:
            yield journal


def _spec_in(file: Path) -> dict[str, Any] | None:
    """Of a saved state, or of a run that is to be run again."""
    try:
        spec = json.loads(file.read_bytes()) if file.name == AGAIN else tensors.load(file)[1]["spec"]
    except (OSError, ValueError, KeyError, RecursionError):
        return None
    return spec if isinstance(spec, dict) else None


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Of torch's global generators, as tensors."""
    state = {"random/cpu": torch.get_rng_state()}
    return state | ({"random/cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_state(kept: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(kept["random/cpu"])
    if device.type == "cuda" and "random/cuda" in kept:  # not if the run began on a CPU
        torch.cuda.set_rng_state(kept["random/cuda"], device)
