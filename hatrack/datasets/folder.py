"""Where the sets lie, and the notes beside them: what can be said of the data folder without reading images or numpy."""

import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

from hatrack.files import schema
from hatrack.files.atomic import read_bytes


class Note(NamedTuple):
    """What is known of a file in the data folder."""

    digest: str
    train: int
    test: int
    source: str
    date: str


COUNT = schema.number(0, 2**40, whole=True)
NOTE = schema.fields({"digest": schema.line, "train": COUNT, "test": COUNT, "source": schema.line, "date": schema.line})


def folder() -> Path:
    """Where complete sets lie: $HATRACK_DATA, or the user's cache folder."""
    given = os.environ.get("HATRACK_DATA", "")
    try:
        return Path(given).expanduser() if given else Path(os.environ.get("XDG_CACHE_HOME") or cache_folder()) / "hatrack"
    except RuntimeError:  # of pathlib
        what = f"HATRACK_DATA must be a folder, not {given!r}: there" if given else "HATRACK_DATA must be set: here"
        raise ValueError(f"{what} is no home folder of that user") from None


def cache_folder() -> Path:
    """The platform's folder for files that can be made again."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    return Path.home() / ".cache"


def place(name: str) -> Path:
    return folder() / f"{name}.npz"


def note(name: str) -> Note | None:
    """What was noted when the file was written; None without a note."""
    path = place(name).with_suffix(".json")
    if not path.exists():
        return None
    try:
        data = json.loads(read_bytes(path))
        NOTE("", data)
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not a readable note of {name}.npz: delete it if the data is good") from None
    return Note(*(data[key] for key in Note._fields))
