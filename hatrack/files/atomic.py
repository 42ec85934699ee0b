"""Atomic writes, so that a file is always complete, and reads of plain files only."""

import os
import time
from contextlib import suppress
from glob import escape
from pathlib import Path

LEFT_BEHIND = 3600  # seconds after which a temporary file is removed: the process that wrote it was killed


def read_bytes(path: Path) -> bytes:
    """Return the content of a plain file; raise a ValueError for anything else, because reading a pipe may never end."""
    try:
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} can't be read: it is not a file")
        return path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from None


def write(path: Path, content: str | bytes) -> None:
    """Write a file atomically: write a temporary file, flush it, and rename it.

    At any moment the file has either its old or its new content, completely. When this returns, it is on the disk.

    Args:
        path: the file; if it is a symbolic link, the file that it points to is replaced.
        content: text, written as UTF-8, or bytes.
    """
    data = content.encode() if isinstance(content, str) else content
    path = path.resolve()  # so that a symbolic link stays one
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(f"{path} is not a file that could be replaced")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno:
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    flush_names(path.parent)
    for other in path.parent.glob(f".{escape(path.name)}.*"):
        with suppress(OSError):
            if time.time() - other.stat().st_mtime > LEFT_BEHIND:
                other.unlink()


def flush_names(folder: Path) -> None:
    """Flush the names of files in a folder to the disk, so that renames are not lost; some systems cannot do this."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def writable(folder: Path) -> Path:
    """Create a folder if it does not exist and return it; raise a ValueError if no file can be written there."""
    probe = folder / ".writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink(missing_ok=True)  # another process may have removed it
    except OSError as error:
        raise ValueError(f"can't write to the folder {folder}: {error.strerror}") from None
    return folder
