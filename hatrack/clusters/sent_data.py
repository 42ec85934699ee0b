"""Data sets that the driver sends to nodes which lack them, once per node."""

from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from hatrack.clusters.jobs import Files
from hatrack.datasets.catalog import SETS
from hatrack.datasets.folder import folder, place
from hatrack.files.atomic import writable, write


def files_of_set(name: str) -> Files:
    """Return the files of a complete set in this machine's data folder; none if it is not there."""
    if name not in SETS:
        return {}
    path = place(name)
    return {file.name: file.read_bytes() for file in (path.with_suffix(".json"), path) if file.is_file() and path.is_file()}


def fetch_set(name: str, ask: Callable[[str], Files | None]) -> bool:
    """Put a set into the data folder of this node; return whether it is there now.

    The first worker of a node that needs the set asks for it; the others wait and find it.

    Args:
        name: the set.
        ask: gets the files of a set from the driver.
    """
    data = writable(folder())
    with FileLock(data / f".{name}.lock"):
        if not place(name).is_file():
            files = ask(name) or {}
            for file in sorted(files, key=lambda file: file.endswith(".npz")):  # the set itself last
                write(data / Path(file).name, files[file])
    return place(name).is_file()
