"""The saved states of a run, from which it continues to the same bits after it was killed.

In a folder lie task-T (the state in which task T began, and what was measured before it) and fit-T-N-0 and -1 (the last two
states of the N-th fit of that task, or its end). To resume, `learn` is called again on the state in which the task began; a
fit that had ended returns at once, the one that was interrupted continues from its last save.

A save copies the state to the host's memory; a thread writes the copy to the disk while training goes on. One write is under
way at a time: the next save, a stop and the end of the run wait for it, and its error is raised there.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from hatrack._version import __version__
from hatrack.engine.interleaving import others_run
from hatrack.files import tensors as tensor_files
from hatrack.files.atomic import is_plain, make_private
from hatrack.methods.method import Method
from hatrack.networks.preprocessing import current_name
from hatrack.training.background import Background
from hatrack.training.checkpoint_schema import check_metadata

if TYPE_CHECKING:
    from hatrack.training.fit_loop import FitLoop
    from hatrack.training.trainer import Trainer

FORMAT = 2
STATE = re.compile(r"(task-\d+|fit-\d+-\d+-[01])\.safetensors")  # the names of our files; others are left alone
State = tuple[dict[str, Tensor], dict[str, Any]]  # tensors and metadata
stopping = threading.Event()  # somebody asked the program to end: save and stop


class Stopped(Exception):  # noqa: N818
    """The run was asked to stop, and saved its state."""


class Checkpointer:
    """Saves the states of one run in a folder and reads them back.

    Args:
        folder: where the states lie; it is made when the first one is written.
        spec: what is run; states of another spec are refused.
        minutes: the time between two saves of a fit.
    """

    def __init__(self, folder: Path, spec: dict[str, Any], *, minutes: float = 5.0) -> None:
        if not minutes >= 0:
            raise ValueError(f"--save-every must be at least 0 minutes, not {minutes:g}")
        self.folder, self.spec, self.seconds = folder, spec, 60 * minutes
        self.task, self.fit, self.saves = 0, -1, 0
        self.last = time.monotonic()
        self.notes: list[str] = []  # what was wrong with files that were passed over
        self.writer = Background()

    # Tasks

    def begin_task(self, task: int, method: Method, trainer: "Trainer", rows: dict[str, Any]) -> None:
        """Save the state in which a task begins, with all that was measured so far."""
        self.wait()
        self.task, self.fit = task, -1
        old = (file for file in self._states() if file.name.startswith(f"fit-{task}-"))
        _remove(old)  # of another process, whose beginning of this task was damaged
        tensors = {f"method/{key}": value for key, value in method.state_dict().items()}
        carried, metadata = trainer.state(method)
        metadata |= {"task": task, "rows": rows, "history": list(method.history.items())}
        self._start_write(self._task_file(task), {**tensors, **carried}, metadata, partial(self._remove_before, task))

    def resume(self, method: Method, trainer: "Trainer") -> dict[str, Any] | None:
        """Go back to the beginning of the task that was interrupted.

        Returns:
            What was measured before it, or None if nothing was saved.
        """
        files = [file for file in self._states() if file.name.startswith("task-")]
        files.sort(key=lambda file: int(file.stem.split("-")[1]), reverse=True)
        for file in files:
            state = self._read(file)
            if state is None:
                continue
            tensors, metadata = state
            own = {key.removeprefix("method/"): v for key, v in tensors.items() if key.startswith("method/")}
            try:
                method.load_state_dict(own)
            except (RuntimeError, LookupError, AttributeError) as error:
                raise ValueError(f"{file} does not fit the method: {' '.join(str(error).split())}") from None
            trainer.load_state(method, tensors, metadata)
            method.history = dict(metadata["history"])
            self.task, self.fit = metadata["task"], -1
            return {"task": self.task, **metadata["rows"]}
        if files:
            raise ValueError(f"{self.folder} holds no state that can be used; remove it to start anew: {self.notes[0]}")
        return None

    # Fits

    def next_fit(self) -> State | None:
        """Begin the next fit of the task; return the last state of it, if one was saved."""
        self.fit += 1
        found = [state for k in (0, 1) if self._fit_file(k).exists() and (state := self._read(self._fit_file(k)))]
        latest = max(found, key=lambda state: int(state[1]["saves"]), default=None)
        self.saves = int(latest[1]["saves"]) if latest else 0
        return latest

    def save_fit(self, loop: "FitLoop", *, ended: bool = False) -> None:
        """Save a fit in place of the last state but one."""
        with loop.stopwatch("saving"):
            self._save_fit(loop, ended=ended)

    def _save_fit(self, loop: "FitLoop", *, ended: bool) -> None:
        self.wait()
        tensors, metadata = loop.state()
        if ended:  # the best state is in the method now
            spare = ("best/",) if loop.regime.keep_state else ("best/", "optimizer/")
            tensors = {key: value for key, value in tensors.items() if not key.startswith(spare)}
        self.saves += 1
        older = [self._fit_file((self.saves + 1) % 2)] if ended else []  # no later state will take its place
        metadata = {**metadata, "task": self.task, "fit": self.fit, "saves": self.saves, "ended": ended}
        self._start_write(self._fit_file(self.saves % 2), tensors, metadata, partial(_remove, older))

    def before_epoch(self, loop: "FitLoop") -> None:
        """Stop if the run was asked to: the first step of a fit may be compiled for a minute. Called before an epoch, and in
        one before its first step if that has waited for its code.

        A fit that has not begun yet, or goes on within an epoch, is saved already.
        """
        if stopping.is_set():
            self._stop(loop, save=bool(loop.result.epochs) and loop.step_index == 0)

    def after_step(self, loop: "FitLoop") -> None:
        """Save if it is time to, or if the run was asked to stop."""
        if stopping.is_set():
            self._stop(loop)
        if self.writer.failed or time.monotonic() - self.last > self.seconds:
            self.save_fit(loop)

    def _stop(self, loop: "FitLoop", *, save: bool = True) -> NoReturn:
        if save:
            self.save_fit(loop)
        self.wait()
        raise Stopped(f"stopped in task {loop.task.name!r}, epoch {len(loop.result.epochs) + 1}, and saved")

    # Files

    def wait(self) -> None:
        """Wait until the last state is on the disk; raise a ValueError if it can't be written.

        Runs beside this one go on, so that many that are stopped together write their states together.
        """
        with others_run():
            self.writer.wait()

    def close(self) -> None:
        """Wait until nothing is being written. An error is dropped: the run has ended for another reason."""
        with suppress(ValueError, OSError):
            self.wait()

    def _task_file(self, task: int) -> Path:
        return self.folder / f"task-{task}.safetensors"

    def _fit_file(self, parity: int) -> Path:
        return self.folder / f"fit-{self.task}-{self.fit}-{parity}.safetensors"

    def _states(self) -> list[Path]:
        """Return our files in the folder."""
        return [file for file in self.folder.glob("*.safetensors") if STATE.fullmatch(file.name) and is_plain(file)]

    def make_folder(self) -> None:
        """Make the folder if it is not there."""
        make_private(self.folder)

    def _start_write(
        self, path: Path, tensors: dict[str, Tensor], metadata: dict[str, Any], then: Callable[[], None]
    ) -> None:
        """Copy a state and start to write it; when it is on the disk, call `then`."""
        self.make_folder()
        about = {"format": FORMAT, "hatrack": __version__, "spec": self.spec}
        copies, text = tensor_files.host_copies(tensors), json.dumps({**about, **metadata}, allow_nan=True)
        self.writer.start(partial(_write, path, copies, text, then))
        self.last = time.monotonic()

    def _remove_before(self, task: int) -> None:
        """Remove what is older than a task. Its beginning stays, and that of the task before it."""
        kept = (self._task_file(task), self._task_file(task - 1))
        _remove(file for file in self._states() if file not in kept)

    def _read(self, path: Path) -> State | None:
        """Read a state; None, with a note, if it can't be used (an older one may)."""
        try:
            tensors, metadata = tensor_files.load(path)
        except ValueError as error:
            self.notes.append(str(error))
            return None
        if not isinstance(metadata.get("format"), int) or metadata["format"] > FORMAT:
            raise ValueError(f"{path} is of format {metadata.get('format')!r}, newer than this version can read")
        if metadata["format"] < FORMAT:
            self.notes.append(f"{path} is of format {metadata['format']}, older than this version can read")
            return None
        if metadata.get("spec") != self.spec:
            raise ValueError(f"{path} belongs to another run")
        try:
            check_metadata(path.name.split("-")[0], metadata)
        except ValueError as error:
            self.notes.append(f"{path} is no state of a run: {error}")
            return None
        if not _belongs(path, metadata):
            self.notes.append(f"{path} is the state of another task or fit")
            return None
        return {current_name(name): value for name, value in tensors.items()}, metadata


def _belongs(path: Path, metadata: dict[str, Any]) -> bool:
    """Return whether a state is that of the task and the fit which the name of its file says."""
    task, *fit = (int(number) for number in path.stem.split("-")[1:])
    own = metadata.get(
        "task", metadata.get("fitted", {}).get("task")
    )  # version 0.1 wrote no numbers into the state of a fit
    return bool(own == task and (not fit or metadata.get("fit", fit[0]) == fit[0]))


def _write(path: Path, copies: dict[str, Tensor], text: str, then: Callable[[], None]) -> None:
    try:
        tensor_files.write_copies(path, copies, text, state=True)
    except OSError as error:
        raise ValueError(f"can't save to {path}: {error.strerror}; what was saved before is still there") from None
    then()


def _remove(files: Iterable[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The state of torch's global generators, as tensors."""
    state = {"random/cpu": torch.get_rng_state()}
    return state | ({"random/cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_state(tensors: dict[str, Tensor], device: torch.device) -> None:
    """Set torch's global generators to a saved state."""
    torch.set_rng_state(tensors["random/cpu"])
    if device.type == "cuda" and "random/cuda" in tensors:  # not if the run began on a CPU
        torch.cuda.set_rng_state(tensors["random/cuda"], device)
