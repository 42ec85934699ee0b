"""The folder of one run: a lock that keeps other processes out, the states of an interrupted run, and its record.

Beside the record NAME.json lie, until it is there, the folder NAME.part with the saved states and the lock NAME.lock. A file
`again` in the folder says that the run is to replace the record that it has, a file `keep` which models the run keeps, a
file `tuned` how its options were chosen, a file `extended` which finished run it goes on from, a file `failed` why it ended
without a record on a cluster. The file `epochs.jsonl` has a line for every epoch, see `hatrack.tracking.lines`; nothing of
the run depends on it.

Only files that a run made are ever removed, and NAME.part must be a folder, not a link to one: what lies elsewhere, and what
somebody put there, is left alone.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from hatrack.experiments.arguments import check_note
from hatrack.experiments.record_schema import EXTENDED
from hatrack.files import tensors as tensor_files
from hatrack.files.atomic import (
    check_own_folder,
    is_plain,
    read_bytes,
    read_names_anew,
    remove_leftovers,
    target_of,
    write,
)
from hatrack.tracking.reader import FILE as LINES
from hatrack.training.checkpoint import STATE, Checkpointer

AGAIN, KEEP, NOTE, EXTENDS, FAILED = "again", "keep", "tuned", "extended", "failed"
TRUNK = "pretrained.trunk"


class RunFolder:
    """The files of one run. `with folder:` keeps other processes out of it.

    Args:
        path: the folder of the saved states, NAME.part.
        spec: what is run.
        minutes: the time between two saves of a fit.
    """

    def __init__(self, path: Path, spec: dict[str, Any], *, minutes: float = 5.0) -> None:
        self.path, self.spec = path, spec
        self.record, self.model = path.with_suffix(".json"), path.with_suffix(".safetensors")
        self.lock = FileLock(path.with_suffix(".lock"))
        self.checkpointer = Checkpointer(path, spec, minutes=minutes)

    def __enter__(self) -> Self:
        place = self.path.parent
        check_own_folder(self.path)
        try:
            place.mkdir(parents=True, exist_ok=True)
            self.lock.acquire(timeout=0)  # the system frees it when a process dies
        except Timeout:
            raise ValueError(f"{self.path.stem} is being run by another process") from None
        except OSError as error:
            raise ValueError(f"can't write to the folder {place}: {error.strerror}") from None
        read_names_anew(place)  # on a network file system: another machine may have written the record just now
        models = {place / target_of(file.name) for file in place.glob(f".{escape(self.path.stem)}.*safetensors.*")}
        for name in (self.record, *sorted(models), *(self.path / name for name in sorted(self._names()))):
            remove_leftovers(name)  # half written when a process was killed
        return self

    def __exit__(self, *_: object) -> None:
        self.checkpointer.close()  # before another process may come in
        if not self.has_states:
            with suppress(OSError):  # where an open file can't be removed, the lock does it by itself
                Path(self.lock.lock_file).unlink(missing_ok=True)
        self.lock.release()

    def files(self) -> list[Path]:
        """Return the files of the run in its folder; the mark that it is to be run again comes first."""
        found = [self.path / name for name in self._names()]
        return [file for file in sorted(found, key=lambda file: (file.name != AGAIN, file.name)) if is_plain(file)]

    def _names(self) -> set[str]:
        """Return the names of files of the run in its folder, also of those that are half written."""
        found = (target_of(file.name) for file in self.path.glob("*"))
        return {
            name for name in found if name in (AGAIN, KEEP, NOTE, EXTENDS, FAILED, TRUNK, LINES) or STATE.fullmatch(name)
        }

    @property
    def has_states(self) -> bool:
        """Whether there is anything to go on from: more than the lines of epochs."""
        return any(file.name != LINES for file in self.files())

    @property
    def done(self) -> bool:
        """Whether the run has its record, and is not to be run again."""
        return self.record.exists() and not (self.path / AGAIN).exists()

    @property
    def blocked(self) -> str:
        """Why the run can't be continued now: another process has it, or nothing can be written. Empty if it can."""
        try:
            with self:
                return ""
        except ValueError as error:
            return str(error)

    @property
    def lines(self) -> Path:
        """The file with a line for every epoch."""
        return self.path / LINES

    def task_model(self, number: int) -> Path:
        """Return the file of the model after the task with this number, which counts from 0."""
        return task_model(self.record, number)

    def remember_kept(self, model: bool, each: bool) -> tuple[bool, bool]:
        """Note which models the run keeps, so that it keeps them when it is continued without being told again.

        Args:
            model: whether the model at the end of the run is kept.
            each: whether the model after each task is kept.

        Returns:
            The two, each of them also true if it was noted before.
        """
        found: dict[str, Any] = {}
        with suppress(OSError, ValueError, RecursionError):
            found = json.loads(read_bytes(self.path / KEEP))
        before = found if isinstance(found, dict) else {}
        now = {"model": model or before.get("model") is True, "each": each or before.get("each") is True}
        if any(now.values()):
            self.checkpointer.make_folder()
            write(self.path / KEEP, json.dumps({**now, "spec": self.spec}), follow=False, private=True)
        return now["model"], now["each"]

    def start_anew(self) -> None:
        """Drop the saved states and mark the record as one to replace, unless that was done before and the run is not
        finished."""
        if not (self.path / AGAIN).exists():
            self.remove_states()
            self.checkpointer.make_folder()
            write(self.path / AGAIN, json.dumps(self.spec), follow=False, private=True)

    def keep_note(self, note: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return how the options of the run were chosen: what was said when it began, or else `note`, which is then kept."""
        file = self.path / NOTE
        if note and not file.exists():
            self.checkpointer.make_folder()
            write(file, json.dumps(dict(note)), follow=False, private=True)
        if not file.exists():
            return {}
        try:
            known: dict[str, Any] = json.loads(read_bytes(file))
            check_note(known)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} does not say how the options were chosen: {error}; remove {self.path}") from None
        return known

    def note_extended(self, note: Mapping[str, Any]) -> None:
        """Note which finished run this one goes on from, for the field `extended` of its record."""
        self.checkpointer.make_folder()
        write(self.path / EXTENDS, json.dumps(dict(note)), follow=False, private=True)

    def extended(self) -> dict[str, Any]:
        """Return what `note_extended` noted; empty if the run began with the first task."""
        if not is_plain(self.path / EXTENDS):
            return {}
        try:
            known: dict[str, Any] = json.loads(read_bytes(self.path / EXTENDS))
            EXTENDED("extended", known)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.path / EXTENDS} does not say what was extended: {error}; remove {self.path}") from None
        return known

    def note_failure(self, why: str) -> None:
        """Note why the run ended without a record, for `hatrack status`. The run may be tried again."""
        self.checkpointer.make_folder()
        write(self.path / FAILED, json.dumps({"why": why, "spec": self.spec}), follow=False, private=True)

    def failure(self) -> str:
        """Return what `note_failure` noted; empty if nothing was."""
        with suppress(OSError, ValueError, RecursionError):
            found = json.loads(read_bytes(self.path / FAILED))
            return str(found["why"]) if isinstance(found, dict) and "why" in found else ""
        return ""

    def remove_states(self) -> None:
        """Remove the files of the run, and their folder if nothing else is in it: the run has its record, or starts anew."""
        for file in self.files():
            file.unlink(missing_ok=True)
        with suppress(OSError):  # somebody else has files there, or there is no folder
            self.path.rmdir()

    def tidy(self) -> None:
        """Remove what is left of a run that was killed after it had its record, unless another process has it."""
        if self.path.exists() or Path(self.lock.lock_file).exists():
            with suppress(ValueError, OSError), self:
                if self.done:
                    self.remove_states()


def task_model(record: Path, number: int) -> Path:
    """Return the file beside a record with the model after one task: NAME.task-1.safetensors is that after the first.

    Args:
        record: the file of the record.
        number: the number of the task, which counts from 0.
    """
    return record.with_name(f"{record.stem}.task-{number + 1}.safetensors")


def unfinished(folder: Path) -> Iterator[RunFolder]:
    """The runs in a folder that were stopped before their end; each has its spec, if one can be read.

    Args:
        folder: a folder of records, or the folder NAME.part of one run.
    """
    for part in [folder] if folder.suffix == ".part" else sorted(folder.glob("*.part")):
        files = [
            file
            for file in RunFolder(part, {}).files()
            if not file.name.startswith("fit-") and file.name not in (NOTE, EXTENDS, LINES)
        ]
        spec = next((spec for file in files if (spec := _spec_in(file))), {})
        if files and not (found := RunFolder(part, spec)).done:
            yield found


def _spec_in(file: Path) -> dict[str, Any] | None:
    """The spec in a saved state, in the mark of a run that is to be run again, or in that of a run that keeps models."""
    try:
        if file.name == AGAIN:
            spec = json.loads(read_bytes(file))
        else:
            spec = (json.loads(read_bytes(file)) if file.name in (KEEP, FAILED) else tensor_files.load(file)[1])["spec"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return spec if isinstance(spec, dict) else None
