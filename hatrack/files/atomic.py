"""Files that are whole or not there: atomic writes, and reads of plain files only."""

import os
import time
from contextlib import suppress
from glob import escape
from pathlib import Path

LEFT_BEHIND = 3600  # seconds after which a temporary file is nobody's: whoever wrote it was killed


def read_bytes(path: Path) -> bytes:
    """The content of a plain file; a pipe or a device could keep us waiting for ever."""
    try:
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} can't be read: it is not a file")
        return path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from None


def write(path: Path, content: str | bytes) -> None:
    """To a temporary name, flushed, renamed: a file of this name is always whole, and on the disk when this returns."""
    data = content.encode() if isinstance(content, str) else content
    path = path.resolve()  # a link stays a link
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
    """A file has its new name on the disk as well, before anything that comes after. Not every system can do that."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def writable(folder: Path) -> Path:
    """The folder, made if need be; an error if nothing can be written there."""
    probe = folder / ".writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink(missing_ok=True)  # another process may have been quicker
    except OSError as error:
        raise ValueError(f"can't write to the folder {folder}: {error.strerror}") from None
    return folder
