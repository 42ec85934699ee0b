"""The TOML file of the benchmark `own`: what it may hold, and a digest of all data that it names. It needs no torch."""

import hashlib
import math
import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hatrack.datasets.images import image_files
from hatrack.files import schema
from hatrack.files.atomic import read_bytes
from hatrack.files.limits import IMAGE
from hatrack.options import nearest

BLOCK = 1 << 20  # bytes that are read at a time
HEAD = re.compile(r"\s*\[\[\s*task\s*\]\]")  # of a task


def _numbers(where: str, value: Any) -> None:
    """Check for one number, or a list of one per channel."""
    one = schema.number(-1e30, 1e30)
    (schema.items(one, least=1) if isinstance(value, list) else one)(where, value)


def _weights(where: str, value: Any) -> None:
    """Check for the word "balanced", or a list of one number per class."""
    if value != "balanced":
        schema.items(schema.number(0, 1e30), least=1)(where, value)


KEYS: dict[str, schema.Check] = {
    "name": schema.line,
    "data": schema.line,
    "classes": schema.number(1, 2**31, whole=True),
    "mean": _numbers,
    "std": _numbers,
    "scale": schema.number(1e-30, 1e30),
    "target": schema.line,
    "class_weights": _weights,
}


@contextmanager
def errors_name(path: Path, entry: dict[str, Any]) -> Iterator[None]:
    """Put the names of the file and the task in front of errors."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}, task {entry['name']!r}: {error}") from None


def fingerprint(tasks: str) -> str:
    """Compute a digest of a TOML file and of all data that it names, so that a run on other data has another name.

    Args:
        tasks: the path of the TOML file.

    Returns:
        A SHA-256; "" if there is no such file.
    """
    path = Path(tasks)
    if not tasks or not path.is_file():
        return ""
    total = hashlib.sha256(read_bytes(path))
    for block in _data(path, read_task_file(path)[1]):
        total.update(block)
    return total.hexdigest()


def grew_from(tasks: str, count: int, digest: str) -> bool:
    """Return whether a TOML file had a fingerprint before tasks were added at its end.

    Args:
        tasks: the path of the TOML file.
        count: how many tasks it had then at least.
        digest: the fingerprint.
    """
    path = Path(tasks)
    text, entries = read_bytes(path).decode(), read_task_file(path)[1]
    for tasks_then in range(count, len(entries)):
        totals = [hashlib.sha256(beginning.encode()) for beginning in _beginnings(text, tasks_then)]
        for block in _data(path, entries[:tasks_then]) if totals else ():
            for total in totals:
                total.update(block)
        if digest in {total.hexdigest() for total in totals}:
            return True
    return False


def _beginnings(text: str, count: int) -> list[str]:
    """Return what a file may have been before its tasks from number `count` on were added: with or without the blank lines
    and comments above them, and with or without a line end."""
    lines = text.splitlines(keepends=True)
    heads = [k for k, line in enumerate(lines) if HEAD.match(line)]
    if not 0 < count < len(heads):
        return []
    end, found = heads[count], list[str]()
    while not found or not lines[end].strip() or lines[end].lstrip().startswith("#"):
        kept = "".join(lines[:end])
        found += [kept, kept.removesuffix("\n").removesuffix("\r")]
        end -= 1
    return found


def _data(path: Path, entries: list[dict[str, Any]]) -> Iterator[bytes]:
    """Yield the names, sizes and contents of all files that tasks name."""
    for entry in entries:
        with errors_name(path, entry):
            data = path.parent / entry["data"]
            for file in image_files(data) if data.is_dir() else [data]:
                size = file.stat().st_size if file.is_file() else 0
                name = file.relative_to(data).as_posix()
                yield f"{entry['data']} {name} {size}\n".encode(errors="surrogateescape")
                if size:
                    with file.open("rb") as content:
                        while block := content.read(BLOCK):
                            yield block


def read_task_file(path: Path) -> tuple[tuple[int, ...] | None, list[dict[str, Any]]]:
    """Return the shape and the tasks that the file names, with every key checked."""
    content = read_bytes(path)
    try:
        data = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    for key in data:
        if key not in ("shape", "task"):
            raise ValueError(f"{path}: no key {key!r}; {nearest(key, ('shape', 'task'))}")
    entries = data.get("task")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{path} contains no tasks; each begins with a line [[task]]")
    for number, entry in enumerate(entries):
        _check(f"{path}, task {number + 1}", entry)
    shape = data.get("shape")
    if shape is not None:
        schema.items(schema.number(1, IMAGE, whole=True), 3, what="numbers: channels, height and width")(
            f"{path}: shape", shape
        )
        if math.prod(shape) > IMAGE:
            raise ValueError(f"{path}: shape {shape} has more than {IMAGE:,} values")
    return (None if shape is None else tuple(shape)), entries


def _check(what: str, entry: dict[str, Any]) -> None:
    """Raise if a task has an unknown key, a wrong value, or lacks a key."""
    for key, value in entry.items():
        if key not in KEYS:
            raise ValueError(f"{what}: no key {key!r}; {nearest(key, KEYS)}")
        KEYS[key](f"{what}: {key}", value)
    for key in ("name", "data"):
        if key not in entry:
            raise ValueError(f"{what}: {key} is missing")
    if ("mean" in entry) != ("std" in entry):
        raise ValueError(f"{what}: mean and std must be given together")
