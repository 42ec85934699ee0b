"""Read the members of a .tar.gz file in memory, with limits on everything that its headers may claim."""

import gzip
import io
import tarfile
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import IO, Self

LONGEST_EXTENSION = 100_000  # bytes
EXTENSIONS = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)


class CheckedTarInfo(tarfile.TarInfo):
    """A tar header that refuses large extended headers, because tarfile reads long names and the like into memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        found = super().frombuf(buf, encoding, errors)
        if found.type in EXTENSIONS and found.size > LONGEST_EXTENSION:
            raise ValueError(f"an extended tar header of {found.size:,} bytes is too long")
        return found


class LimitedGzip(io.RawIOBase):
    """Reads a gzip file and raises if it decompresses to more than a limit: a small file may contain any amount of data."""

    def __init__(self, raw: IO[bytes], limit: int) -> None:
        self.file, self.left, self.limit = gzip.GzipFile(fileobj=raw), limit, limit

    def read(self, size: int = -1) -> bytes:
        found = self.file.read(min(size, self.left + 1) if size >= 0 else self.left + 1)
        self.left -= len(found)
        if self.left < 0:
            raise ValueError(f"it decompresses to more than {self.limit:,} bytes, more than the whole set could have")
        return found


def tar_members(raw: IO[bytes], limit: int) -> Iterator[tuple[PurePosixPath, int, IO[bytes]]]:
    """Yield path, size and contents of the files in a .tar.gz of at most `limit` bytes, in the order of the archive."""
    whole = LimitedGzip(raw, limit)
    with tarfile.open(fileobj=whole, mode="r|", tarinfo=CheckedTarInfo) as tar:
        for info in tar:
            contents = tar.extractfile(info) if info.isfile() else None
            if contents is not None:
                yield PurePosixPath(info.name), info.size, contents
    while whole.read(1 << 20):  # up to the end, where gzip compares the data with a checksum
        pass
