"""Read numeric arrays from a MATLAB 5 file, as far as SVHN's files need it: real, little-endian, compressed or not.

The format: https://www.mathworks.com/help/pdf_doc/matlab/matfile_format.pdf. An element is a tag (type, size) and data,
padded to a multiple of eight bytes; up to four bytes of data fit into the tag itself. A matrix is an element that contains
four elements: flags, dimensions, name and numbers.
"""

import math
import struct
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

MATRIX, COMPRESSED = 14, 15
NUMBERS = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}
NUMERIC = range(6, 16)  # the classes of matrices that contain numbers
IS_COMPLEX = 0x800


def read(path: Path, wanted: Collection[str], limit: int) -> dict[str, np.ndarray[Any, Any]]:
    """Read some matrices of a file.

    Args:
        path: the file.
        wanted: the names of the matrices; all must be there.
        limit: the largest number of bytes of a matrix that is accepted.

    Returns:
        The matrices by name.
    """
    found = {}
    for element in _matrices(path, limit + 1000):
        name, numbers = _matrix(element, wanted)
        if numbers is not None:
            found[name] = numbers
    if missing := sorted(set(wanted) - set(found)):
        raise ValueError(f"{path} has no array {missing[0]!r}")
    return found


def _matrices(path: Path, limit: int) -> Iterator[memoryview]:
    """Yield the data of every matrix element of a file, decompressed."""
    with path.open("rb") as file:
        if file.read(128)[124:] != b"\x00\x01IM":
            raise ValueError(f"{path} is not a MATLAB 5 file")
        left = path.stat().st_size - 128
        while left >= 8:
            kind, size = struct.unpack("<II", file.read(8))
            left -= 8 + size
            if left < 0:
                raise ValueError(f"{path} ends too early")
            data = memoryview(file.read(size))
            if kind == COMPRESSED:
                kind, _, data = next(_elements(_inflate(path, data, limit)), (0, 0, data))
            if kind == MATRIX:
                yield data


def _inflate(path: Path, data: memoryview, limit: int) -> memoryview:
    """Decompress data; raise if it is damaged or decompresses to more than `limit` bytes."""
    inflater = zlib.decompressobj()
    result = inflater.decompress(data, limit)
    if not inflater.eof:
        raise ValueError(f"{path} has an array that is damaged, or larger than the whole set could be")
    return memoryview(result)


def _elements(data: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """Yield type, size and data of every element."""
    at = 0
    while at + 8 <= len(data):
        kind, size = struct.unpack_from("<II", data, at)
        if kind >> 16:  # a small element: type and size in four bytes, the data in the next four
            kind, size = kind & 0xFFFF, kind >> 16
            start, step = at + 4, 8
        else:
            start, step = at + 8, 8 + -(-size // 8) * 8
        if start + size > len(data):
            raise ValueError("an array ends too early")
        yield kind, size, data[start : start + size]
        at += step


def _matrix(data: memoryview, wanted: Collection[str]) -> tuple[str, np.ndarray[Any, Any] | None]:
    """Return the name and the array of a matrix element; None in place of the array if it is not wanted."""
    elements = _elements(data)
    try:
        flags, shape, name = (bytes(next(elements)[2]) for _ in range(3))
        title = name.decode("ascii", "replace")
        if title not in wanted:
            return title, None
        kind, _, numbers = next(elements)
        (flag,) = struct.unpack_from("<I", flags)
        dimensions = [int(n) for n in np.frombuffer(shape, "<i4")]
    except (StopIteration, struct.error):
        raise ValueError("an array ends too early") from None
    if flag & 0xFF not in NUMERIC or flag & IS_COMPLEX or kind not in NUMBERS:
        raise ValueError(f"array {title!r} does not contain real numbers")
    values = np.frombuffer(numbers, NUMBERS[kind])
    if min(dimensions, default=-1) < 0 or math.prod(dimensions) != len(values):
        raise ValueError(f"array {title!r} has {len(values)} numbers, but its header says shape {tuple(dimensions)}")
    return title, values.reshape(dimensions, order="F")
