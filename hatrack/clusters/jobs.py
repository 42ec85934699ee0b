"""What travels between the driver of a fleet and its workers: jobs, results, messages, and the files of a run."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hatrack.experiments.run_folder import RunFolder
from hatrack.experiments.spec import Run
from hatrack.files.atomic import is_plain, write

Files = dict[str, bytes]  # by their names in the folder of the records
End = Literal["record", "diverged", "stopped", "failed", "node"]
Seen = dict[str, tuple[int, int]]  # when each file was changed, and its size


@dataclass(frozen=True)
class Job:
    """One run as a worker gets it.

    Attributes:
        name: the name of the run.
        spec: what to run.
        how: keyword arguments of `run`, without the folder.
        out: the folder of the records on the driver's machine, for messages.
        folder: that folder, if the workers have it too; None if files travel through the engine.
        files: the files of the run so far, if they travel.
        attempt: which attempt this is, from 1; a worker that begins a later one asks for newer files.
        threads: of torch.
        send: whether the driver sends data sets that the node lacks.
    """

    name: str
    spec: Run
    how: Mapping[str, Any]
    out: str = ""
    folder: Path | None = None
    files: Files = field(default_factory=dict)
    attempt: int = 1
    threads: int = 1
    send: bool = False


class Result(NamedTuple):
    """How a job ended on a worker.

    Attributes:
        end: "record"; "diverged"; "stopped" if it was asked to; "failed" if the run can't be carried out; "node" if the node
            is to blame, such as a full disk, and another one may do better.
        text: the record as JSON, or why there is none.
        files: what the run left, if files travel.
        node: where it was.
    """

    end: End
    text: str = ""
    files: Files = {}  # noqa: RUF012
    node: str = ""


# The files of a run


def changes(folder: RunFolder, seen: Seen) -> tuple[Files, list[str]]:
    """Return the files of a run that have changed since the last call, and the names of all that are there.

    Args:
        folder: the files of the run.
        seen: what was there at the last call; it is updated.
    """
    changed, names = {}, []
    for path in _paths(folder):
        name = path.relative_to(folder.path.parent).as_posix()
        with suppress(OSError):  # it was removed just now
            stat = path.stat()
            names.append(name)
            if seen.get(name) != (stat.st_mtime_ns, stat.st_size):
                changed[name] = path.read_bytes()
                seen[name] = stat.st_mtime_ns, stat.st_size
    for name in seen.keys() - set(names):
        del seen[name]
    return changed, names


def read_files(folder: RunFolder) -> Files:
    """Return all files of a run: its saved states, and models beside its record."""
    return changes(folder, {})[0]


def write_files(folder: RunFolder, files: Mapping[str, bytes], names: list[str] | None = None) -> None:
    """Write files of a run, then remove those that are no longer among `names`.

    Every file is written whole or not at all, and what is new comes before what is old goes: a driver that is killed in
    between leaves states from which the run goes on.

    Args:
        folder: the files of the run.
        files: new content by name.
        names: the names of all files that the run has; None to remove nothing.
    """
    place, allowed = folder.path.parent, f"{folder.path.stem}."
    for name, content in files.items():
        parts = Path(name).parts
        assert name.startswith(allowed), name
        assert len(parts) <= 2, name
        assert ".." not in parts, name
        if len(parts) == 2:
            folder.checkpointer.make_folder()
        write(place / name, content, follow=False, private=len(parts) == 2)
    for path in _paths(folder) if names is not None else ():
        if path.relative_to(place).as_posix() not in (names or ()) and path.parent == folder.path:
            path.unlink(missing_ok=True)


def _paths(folder: RunFolder) -> list[Path]:
    place, stem = folder.path.parent, folder.path.stem
    names = {
        folder.model.name,
        *(path.name for path in place.glob("*.task-*.safetensors") if path.name.startswith(f"{stem}.")),
    }
    return [*folder.files(), *(place / name for name in sorted(names) if is_plain(place / name))]
