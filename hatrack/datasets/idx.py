"""Read idx files, the format of MNIST and its relatives, compressed or not."""

import gzip
import math
from typing import IO

from hatrack.datasets.cache import empty, fill
from hatrack.datasets.images import Image8


def read_idx(raw: IO[bytes], what: str, shape: tuple[int, ...], limit: int) -> Image8:
    """Read an idx file: two zeros, the data type, the number of dimensions, the sizes, the data.

    Args:
        raw: the file.
        what: its name, for error messages.
        shape: the shape of one item; () for labels.
        limit: the largest number of items that is accepted.
    """
    head = raw.read(4)
    if head != bytes((0, 0, 8, len(shape) + 1)):
        raise ValueError(f"{what} is not an idx file of {len(shape) + 1} dimensions in bytes")
    sizes = [int.from_bytes(raw.read(4), "big") for _ in range(head[3])]
    if tuple(sizes[1:]) != shape or sizes[0] > limit:
        raise ValueError(f"{what} has the sizes {sizes}; at most {limit} items of shape {shape} were expected")
    flat = empty(what, (math.prod(sizes),))
    fill(raw, flat)
    return flat.reshape(sizes)


def decompressed(raw: IO[bytes]) -> IO[bytes]:
    """Return a file that reads the decompressed contents if `raw` is a gzip file; otherwise `raw` itself."""
    magic = raw.read(2)
    raw.seek(0)
    return gzip.GzipFile(fileobj=raw) if magic == b"\x1f\x8b" else raw  # type: ignore[return-value]
