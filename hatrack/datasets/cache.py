"""The data folder: for every set an uncompressed .npz file, and a .json file of metadata with the digest of its arrays.

    mnist.npz    x_train y_train x_test y_test, all uint8; images (n, 28, 28) or (n, 32, 32, 3)
    mnist.json   {"digest": ..., "train": 60000, "test": 10000, "source": ..., "date": ...}

An .npz file without metadata (put there by hand) is accepted if its types, shapes and labels are those of the set.
"""

import contextlib
import datetime
import errno
import hashlib
import json
import math
import re
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import filelock
import numpy as np

from hatrack.datasets.catalog import SETS, DataSet
from hatrack.datasets.folder import Note as Note
from hatrack.datasets.folder import folder as folder
from hatrack.datasets.folder import note as note
from hatrack.datasets.folder import place as place
from hatrack.files.atomic import new_file, remove_leftovers
from hatrack.files.atomic import write as write_file
from hatrack.files.limits import check_image, check_unpacked
from hatrack.text import say

ARRAYS = ("x_train", "y_train", "x_test", "y_test")
BROKEN = (ValueError, KeyError, EOFError, OSError, RuntimeError, zlib.error, zipfile.BadZipFile)
DEFLATED = 1032  # the largest factor by which deflate compresses
LONGEST_HEADER = 10_000
DIMENSIONS, DIGITS = 8, 15  # the largest number of dimensions of an array, and of digits of a size
Arrays = dict[str, np.ndarray[Any, np.dtype[np.uint8]]]


def digest(arrays: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """Return the sha256 of name, dtype, shape and bytes of each array; it does not depend on how they are stored."""
    total = hashlib.sha256()
    for key in ARRAYS:
        array = np.ascontiguousarray(arrays[key])
        total.update(f"{key} {array.dtype.str} {array.shape}\n".encode())
        total.update(array.data)
    return total.hexdigest()


# Reading


def read(path: Path, name: str) -> Arrays:
    """Read and check the .npz file of a set. Whatever its headers say, it takes at most twice the memory of the set."""
    spec = SETS[name]
    arrays = open_npz(path, limit=2 * (spec.train + spec.test) * math.prod(spec.shape), kind=np.uint8)
    check(str(path), arrays, spec)
    return arrays


def open_npz(path: Path, limit: float = math.inf, kind: Any = None) -> dict[str, np.ndarray[Any, Any]]:
    """Read the four arrays of an .npz file; nothing is ever unpickled.

    Args:
        path: the file.
        limit: the largest number of elements of an array that is accepted.
        kind: the data type that the arrays must have; None: any type of numbers.
    """
    try:
        if not path.is_file():
            raise ValueError("it is not a file")
        with path.open("rb") as raw, zipfile.ZipFile(raw) as file:
            return {key: _array(file, key, limit, kind, path.stat().st_size) for key in ARRAYS}
    except BROKEN as error:
        said = error.args[0] if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is not a readable data file with {', '.join(ARRAYS)}: {said}") from None


def _array(file: zipfile.ZipFile, key: str, limit: float, wanted: Any, there: int) -> np.ndarray[Any, Any]:
    """Read one array. `there` is the size of the file: it bounds the size of the array, also if this is compressed."""
    info = file.getinfo(f"{key}.npy")
    gain = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: DEFLATED}.get(info.compress_type)
    if gain is None:
        raise ValueError(f"{key} is compressed in a way that numpy does not use")
    if info.file_size > gain * min(info.compress_size, there):
        raise ValueError(
            f"{key} claims {info.file_size:,} bytes, but its {info.compress_size:,} bytes in the file cannot contain them"
        )
    with file.open(info) as raw:
        shape, fortran, kind = _header(key, raw)
        if wanted is not None and kind != wanted:
            raise ValueError(f"{key} must be {np.dtype(wanted)}, not {kind}")
        size = math.prod(shape)
        if size > limit:
            raise ValueError(f"{key} of shape {shape} is larger than the whole set could be")
        if raw.tell() + size * kind.itemsize != info.file_size:
            raise ValueError(f"{key} claims the shape {shape}, but has {info.file_size:,} bytes")
        check_image(key, shape[1:])
        check_unpacked(key, info.file_size, min(info.compress_size, there))
        array = empty(key, (size,), kind)
        fill(raw, array.view(np.uint8))
    return array.reshape(shape, order="F" if fortran else "C")


def _header(key: str, raw: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read shape, order and type from the header of an array. Unlike numpy, it evaluates no Python expression."""
    magic, version = raw.read(6), raw.read(2)
    if magic != b"\x93NUMPY" or len(version) != 2 or not 1 <= version[0] <= 3:
        raise ValueError(f"{key} is not an array")
    length = int.from_bytes(raw.read(2 if version[0] == 1 else 4), "little")
    if length > LONGEST_HEADER:
        raise ValueError(f"{key} has a header of {length:,} bytes, which is too long")
    text = raw.read(length).decode("latin1")
    found = dict(re.findall(r"'(descr|fortran_order|shape)': *('[^']*'|True|False|\([\dL, ]*\))", text))
    kind = found.get("descr", "").strip("'")
    if kind in ("|O", "O"):
        raise ValueError(f"{key} contains pickled objects, not numbers")
    sizes = re.findall(r"\d+", found.get("shape", "x"))
    if not re.fullmatch(r"[<>|=]?(b1|[iu][1248]|f[248])", kind) or len(found) < 3:
        raise ValueError(f"{key} is not an array of numbers")
    if len(sizes) > DIMENSIONS or any(len(size) > DIGITS for size in sizes):
        raise ValueError(f"{key} claims the shape {found['shape'][:100]}, which is too large")
    return tuple(map(int, sizes)), found["fortran_order"] == "True", np.dtype(kind)


def empty(what: str, shape: Sequence[int], kind: Any = np.uint8) -> np.ndarray[Any, Any]:
    """Allocate an array; raise a ValueError that names it (`what`) if there is not enough memory."""
    try:
        return np.empty(shape, kind)
    except (MemoryError, ValueError, OverflowError):
        raise ValueError(f"{what}: there is not enough memory for an array of shape {tuple(shape)}") from None


def fill(raw: IO[bytes], array: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Read a file to its end into a flat array of exactly this size; at the end, zip and gzip files check their checksum."""
    at = 0
    while chunk := raw.read(1 << 20):
        if at + len(chunk) > len(array):
            raise ValueError(f"it has more data than the {len(array):,} bytes that its header states")
        array[at : at + len(chunk)] = np.frombuffer(chunk, np.uint8)
        at += len(chunk)
    if at < len(array):
        raise ValueError(f"it ends after {at:,} of {len(array):,} bytes")


def check(what: str, arrays: Mapping[str, np.ndarray[Any, Any]], spec: DataSet) -> None:
    """Raise a ValueError if types, shapes, counts or labels are not those of the set; `what` names the arrays."""
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


def verified(name: str) -> Arrays:
    """Read a set from the data folder; raise if its digest is not the one in its metadata."""
    noted = note(name)
    arrays = read(place(name), name)
    if noted is not None and digest(arrays) != noted.digest:
        raise ValueError(
            f"{place(name)} has changed since it was {noted.source} on {noted.date}: its digest differs; get or import "
            f"{name} again, or delete {name}.json if you put this file there yourself"
        )
    return arrays


# Writing


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the lock of a set, so that only one process writes it; the system releases the lock if the process dies."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder() / f".{name}.lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            say(f"another process is downloading or importing {name}; waiting for it", sys.stderr)
            lock.acquire()
    except OSError as error:
        raise OSError(f"can't write to the data folder {folder()}: {error.strerror or error}") from None
    try:
        yield
    finally:
        lock.release()


def keep(name: str, arrays: Arrays, source: str) -> Note:
    """Check a set and write it to the data folder, atomically. Call it within `locked`.

    Args:
        name: the set.
        arrays: x_train, y_train, x_test and y_test.
        source: where they come from, for the metadata.

    Returns:
        The metadata.
    """
    arrays = {key: np.ascontiguousarray(arrays[key]) for key in ARRAYS}
    check(name, arrays, SETS[name])
    source = "".join(c if c.isprintable() else "?" for c in source)
    today = datetime.date.today().isoformat()
    new = Note(digest(arrays), len(arrays["y_train"]), len(arrays["y_test"]), source, today)
    path = place(name)
    remove_leftovers(path)
    notes = path.with_suffix(".json")
    with room(name):
        # the old metadata go first: data without metadata is valid, with those of other data it is not
        with new_file(path, then=lambda: notes.unlink(missing_ok=True)) as file:
            np.savez(file, allow_pickle=False, **arrays)
        write_file(notes, json.dumps(new._asdict(), indent=1) + "\n")
    return new


@contextlib.contextmanager
def room(name: str) -> Iterator[None]:
    """Replace the error of a full disk by one that names the data folder and the set."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            f"no space left in {folder()} for {name}: free some space, or set HATRACK_DATA to another folder"
        ) from None
