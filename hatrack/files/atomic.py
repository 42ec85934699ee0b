"""Atomic writes, so that a file is always complete, reads of plain files only, and folders that nobody else reads."""

import hashlib
import io
import math
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import IO

from hatrack.files.limits import TEXT

LEFT_BEHIND = 3600  # seconds after which a temporary file is removed: the process that wrote it was killed
TEMPORARY = re.compile(r"\.(?P<name>.+)\.\d+(-[0-9a-f]{16})?", re.DOTALL)  # .NAME.PID-RANDOM; in version 0.1 .NAME.PID


# Reading


def read_bytes(path: Path, most: int | None = TEXT) -> bytes:
    """Return the content of a plain file; raise a ValueError for anything else, because reading a pipe may never end.

    Args:
        path: the file.
        most: the largest number of bytes that is accepted; None for any.
    """
    try:
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} can't be read: it is not a file")
        with path.open("rb") as file:
            if most is not None and os.fstat(file.fileno()).st_size > most:
                raise ValueError(f"{path} has more than {most:,} bytes, the most that is accepted")
            return file.read()
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from None


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a plain file."""
    return hashlib.sha256(read_bytes(path, most=None)).hexdigest()


# Writing


def write(path: Path, content: str | bytes, *, follow: bool = True, private: bool = False) -> None:
    """Write a file atomically: write a temporary file, flush it, and rename it.

    At any moment the file has either its old or its new content, completely. When this returns, it is on the disk.

    Args:
        path: the file.
        content: text, written as UTF-8, or bytes.
        follow: if the file is a symbolic link, replace the file that it points to; if False, replace the link itself.
        private: only the user may read and write the file.
    """
    path = path.resolve() if follow else path
    with suppress(FileNotFoundError):
        kind = (path.stat if follow else path.lstat)().st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISLNK(kind) or stat.S_ISDIR(kind)):  # os.replace refuses a folder
            raise ValueError(f"{path} is not a file that could be replaced")
    with new_file(path, private=private) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    remove_leftovers(path, LEFT_BEHIND)


@contextmanager
def new_file(path: Path, *, private: bool = False, then: Callable[[], None] = lambda: None) -> Iterator[IO[bytes]]:
    """Open a temporary file that takes the place of `path` when the block ends; if it fails, nothing has changed.

    The temporary file has a name that nobody can know before, and is new: no link of that name is ever followed.

    Args:
        path: the file to be written or replaced; if it is a symbolic link, the link is replaced.
        private: only the user may read and write the file.
        then: called when the new content is on the disk, just before it takes its place.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(8)}")
    try:
        with io.open(temporary, "xb", opener=_open_private if private else None) as file:  # noqa: UP020
            yield file
            file.flush()
            os.fsync(file.fileno())
        then()
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno:
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    flush_names(path.parent)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def target_of(name: str) -> str:
    """Return the name of the file that a temporary file of this name was to become; any other name stays as it is."""
    found = TEMPORARY.fullmatch(name)
    return found["name"] if found else name


def remove_leftovers(path: Path, seconds: float = -math.inf) -> None:
    """Remove temporary files of `path` that processes left when they were killed: those older than so many seconds."""
    for file in path.parent.glob(f".{escape(path.name)}.*"):
        with suppress(OSError):
            if target_of(file.name) == path.name and is_plain(file) and time.time() - file.lstat().st_mtime >= seconds:
                file.unlink()


def is_plain(path: Path) -> bool:
    """Return whether a path is that of a file: no folder, no link, no pipe."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def flush_names(folder: Path) -> None:
    """Flush the names of files in a folder to the disk, so that renames are not lost; some systems cannot do this."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def read_names_anew(folder: Path) -> None:
    """Read the names of files in a folder from the server, of which a network file system keeps a copy for a while: opening
    the folder makes NFS ask whether it has changed."""
    with suppress(OSError):
        os.close(os.open(folder, os.O_RDONLY))


# Folders


def writable(folder: Path) -> Path:
    """Create a folder if it does not exist and return it; raise a ValueError if no file can be written there."""
    probe = folder / f".writable.{os.getpid()}-{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise ValueError(f"can't write to the folder {folder}: {error.strerror}") from None
    return folder


def check_folder(folder: Path, otherwise: str = "") -> None:
    """Raise a ValueError if a folder is not there; `otherwise` says what would make it."""
    if folder.is_file():
        raise ValueError(f"{str(folder)!r} is a file, no folder; it is in the folder {str(folder.parent)!r}")
    if not folder.is_dir():
        raise ValueError(f"no folder {str(folder)!r}" + (f"; {otherwise}" if otherwise else ""))


def check_own_folder(folder: Path) -> None:
    """Raise a ValueError if a link or a file has the name of a folder that is ours: we would change what lies elsewhere."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        kind = "a symbolic link" if folder.is_symlink() else "a file"
        raise ValueError(f"{folder} must be a folder that hatrack made, not {kind}: remove it or choose another folder")


def make_private(folder: Path) -> None:
    """Create a folder that only the user may read, and flush its name; raise as `check_own_folder` does."""
    check_own_folder(folder)
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        flush_names(folder.parent)
