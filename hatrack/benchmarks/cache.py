"""The data folder: one .npz file per set, uncompressed, and beside it a note with the digest of its arrays.

    mnist.npz    x_train y_train x_test y_test, all uint8; images (n, 28, 28) or (n, 32, 32, 3)
    mnist.json   {"digest": ..., "train": 60000, "test": 10000, "source": ..., "date": ...}

A file without a note (put there by hand) is checked as far as that is possible without one.
"""

import contextlib
import datetime
import errno
import hashlib
import json
import math
import os
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import filelock
import numpy as np
from numpy.lib import format as npy

from hatrack.benchmarks.sets import SETS, DataSet
from hatrack.record import write as write_file

ARRAYS = ("x_train", "y_train", "x_test", "y_test")
BROKEN = (ValueError, KeyError, EOFError, OSError, RuntimeError, zlib.error, zipfile.BadZipFile)
Arrays = dict[str, np.ndarray[Any, np.dtype[np.uint8]]]


class Note(NamedTuple):
    """What is known of a file in the data folder."""

    digest: str
    train: int
    test: int
    source: str
    date: str


def folder() -> Path:
    """Where complete sets lie: $HATRACK_DATA, or the user's cache folder."""
    if os.environ.get("HATRACK_DATA"):
        return Path(os.environ["HATRACK_DATA"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or cache_folder()) / "hatrack"


def cache_folder() -> Path:
    """The platform's folder for files that can be made again."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    return Path.home() / ".cache"


def place(name: str) -> Path:
    return folder() / f"{name}.npz"


def digest(arrays: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """sha256 over name, dtype, shape and bytes of each array: the same for any way of storing them."""
    total = hashlib.sha256()
    for key in ARRAYS:
        array = np.ascontiguousarray(arrays[key])
        total.update(f"{key} {array.dtype.str} {array.shape}\n".encode())
        total.update(array.data)
    return total.hexdigest()


# Reading


def read(path: Path, name: str) -> Arrays:
    """The arrays of a file, checked. No header can make it take more memory than twice the set has."""
    spec = SETS[name]
    arrays = open_npz(path, limit=2 * (spec.train + spec.test) * math.prod(spec.shape), kind=np.uint8)
    check(str(path), arrays, spec)
    return arrays


def open_npz(path: Path, limit: float = math.inf, kind: Any = None) -> dict[str, np.ndarray[Any, Any]]:
    """The four arrays of a file; nothing is ever unpickled."""
    try:
        with path.open("rb") as raw, zipfile.ZipFile(raw) as file:
            return {key: _array(file, key, limit, kind) for key in ARRAYS}
    except BROKEN as error:
        said = error.args[0] if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is not a readable data file with {', '.join(ARRAYS)}: {said}") from None


def _array(file: zipfile.ZipFile, key: str, limit: float, wanted: Any) -> np.ndarray[Any, Any]:
    info = file.getinfo(f"{key}.npy")
    with file.open(info) as raw:
        header = npy.read_array_header_1_0 if npy.read_magic(raw) == (1, 0) else npy.read_array_header_2_0
        shape, fortran, kind = header(raw)
        if kind.hasobject:
            raise ValueError(f"{key} holds pickled objects, not numbers")
        if wanted is not None and kind != wanted:
            raise ValueError(f"{key} must be {np.dtype(wanted)}, not {kind}")
        size = math.prod(shape)
        if size > limit:
            raise ValueError(f"{key} of shape {shape} is larger than the whole set could be")
        if raw.tell() + size * kind.itemsize != info.file_size:
            raise ValueError(f"{key} should be of shape {shape}, but has {info.file_size:,} bytes")
        array = np.empty(size, kind)
        fill(raw, array.view(np.uint8))
    return array.reshape(shape, order="F" if fortran else "C")


def fill(raw: IO[bytes], array: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Read exactly the bytes of a flat array, to the end of the file: there a zip or gzip checks what it has read."""
    at = 0
    while chunk := raw.read(1 << 20):
        if at + len(chunk) > len(array):
            raise ValueError("more data than its header says")
        array[at : at + len(chunk)] = np.frombuffer(chunk, np.uint8)
        at += len(chunk)
    if at < len(array):
        raise ValueError(f"it ends after {at:,} of {len(array):,} bytes")


def check(what: str, arrays: Mapping[str, np.ndarray[Any, Any]], spec: DataSet) -> None:
    """Types, shapes, counts and labels are those of the set, or an error says which are not."""
    for key in ARRAYS:
        if arrays[key].dtype != np.uint8:
            raise ValueError(f"{what}: {key} must be uint8, not {arrays[key].dtype}")
    for part, said in (("train", "training"), ("test", "test")):
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
        if x.shape[1:] != spec.shape:
            raise ValueError(f"{what}: x_{part} must be images of shape {spec.shape}, not {x.shape[1:]}")
        if y.shape != x.shape[:1]:
            raise ValueError(f"{what}, {said}: {len(x)} images, but labels of shape {y.shape}; one per image is needed")
        if not len(y):
            raise ValueError(f"{what}, {said}: there are no images")
        counts = np.bincount(y, minlength=spec.classes)
        if len(counts) > spec.classes:
            raise ValueError(
                f"{what}, {said}: label {y.max()} is outside the {spec.classes} classes 0 to {spec.classes - 1}"
            )
        if part == "train" and not counts.all():
            raise ValueError(f"{what}, {said}: class {counts.argmin()} of {spec.classes} has no example")


def note(name: str) -> Note | None:
    """What was noted when the file was written; None without a note."""
    path = place(name).with_suffix(".json")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Note(*(kind(data[key]) for key, kind in Note.__annotations__.items()))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{path} is not a readable note of {name}.npz: delete it if the data is good") from None


def verified(name: str) -> Arrays:
    """The arrays of a set in the data folder, compared with their note."""
    noted = note(name)
    arrays = read(place(name), name)
    if noted is not None and digest(arrays) != noted.digest:
        raise ValueError(
            f"{place(name)} is not what was {noted.source} on {noted.date}: its digest differs; get or import {name} again, "
            f"or delete {name}.json if this file was put there by hand"
        )
    return arrays


# Writing


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Only one process writes a set at a time. The system lets go of the lock of a process that has died."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder() / f".{name}.lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            print(f"another process is at work on {name}; waiting for it", file=sys.stderr)
            lock.acquire()
    except OSError as error:
        raise OSError(f"can't write to the data folder {folder()}: {error.strerror or error}") from None
    try:
        yield
    finally:
        lock.release()


def keep(name: str, arrays: Arrays, source: str) -> Note:
    """Put a set in the data folder, whole or not at all. Call it with the lock held."""
    arrays = {key: np.ascontiguousarray(arrays[key]) for key in ARRAYS}
    check(name, arrays, SETS[name])
    today = datetime.date.today().isoformat()
    new = Note(digest(arrays), len(arrays["y_train"]), len(arrays["y_test"]), source, today)
    path = place(name)
    for stray in path.parent.glob(f".{path.name}.*"):  # of a process that was killed
        stray.unlink(missing_ok=True)
    with room(name):
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with temporary.open("wb") as file:
                np.savez(file, allow_pickle=False, **arrays)
                file.flush()
                os.fsync(file.fileno())
            path.with_suffix(".json").unlink(missing_ok=True)  # without a note a file is readable, with a wrong one not
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        write_file(path.with_suffix(".json"), json.dumps(new._asdict(), indent=1) + "\n")
    return new


@contextlib.contextmanager
def room(name: str) -> Iterator[None]:
    """Say in one line that the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(f"no space left in {folder()} for {name}: free some, or set HATRACK_DATA to another folder") from None
