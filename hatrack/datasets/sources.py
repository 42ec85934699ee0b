"""Load image sets: the samples that come with the package, or complete sets from the data folder."""

import functools
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hatrack.datasets import cache, images
from hatrack.datasets.cache import folder
from hatrack.datasets.catalog import SAMPLES, SETS
from hatrack.options import Option, choose

__all__ = ["SETS", "Data", "Source", "Valid", "folder", "load", "load_all", "read_arrays", "require"]

SHIPPED = Path(__file__).parent / "samples"
AT_A_TIME = 4  # sets that are read at a time: each takes up to twice its memory until it is in its final form
BLOCK = 256  # images whose channels are separated at a time: they fit in a processor's cache

Data = Annotated[
    Literal["full", "sample"], Option("the complete set, or the 4,000 + 1,000 images that come with the package")
]
Valid = Annotated[float, Option("share of the training set held out for validation", low=0, high=0.9)]


class Source(NamedTuple):
    """A data set: images (n, channels, height, width) in uint8 and labels in int64, for training and test."""

    classes: int
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def load(name: str, data: str = "full") -> Source:
    """Load a set. It is cached, so that all tasks that are made from it share its images.

    Args:
        name: the set, one of SETS.
        data: "full" for the complete set in the data folder, "sample" for the images that come with the package.

    Returns:
        Images and labels. A FileNotFoundError says how to get the set if it is missing.
    """
    require(name, data=data)
    path = SHIPPED / f"{name}.npz" if data == "sample" else cache.place(name)
    metadata = path.with_suffix(".json")
    files = [path, metadata] if metadata.exists() else [path]
    versions = tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in map(Path.stat, files))
    return _load(path, name, data, versions)


def load_all(names: Iterable[str], data: str = "full") -> dict[str, Source]:
    """Load several sets in parallel threads; reading files, their digests and copies do not hold Python's lock.

    Args:
        names: the sets; one may be named several times.
        data: as in `load`.

    Returns:
        The sets by name. A FileNotFoundError names all that are missing and how to get them.
    """
    wanted = tuple(dict.fromkeys(names))
    require(*wanted, data=data)
    with ThreadPoolExecutor(min(AT_A_TIME, os.cpu_count() or 1)) as pool:
        return dict(zip(wanted, pool.map(functools.partial(load, data=data), wanted), strict=True))


@functools.lru_cache(maxsize=16)
def _load(path: Path, name: str, data: str, versions: tuple[tuple[int, ...], ...]) -> Source:
    """Load a set once per version of its files: `versions` makes the cache read a file again that was replaced."""
    arrays = cache.read(path, name) if data == "sample" else cache.verified(name)
    train, test = (_tensors(arrays[f"x_{part}"], arrays[f"y_{part}"]) for part in ("train", "test"))
    return Source(SETS[name].classes, train, test)


def _tensors(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> tuple[Tensor, Tensor]:
    """Return images as (n, channels, height, width) and labels as int64."""
    raw = torch.from_numpy(x)[:, None] if x.ndim == 3 else torch.from_numpy(_separate_channels(x))
    return raw, torch.from_numpy(y).long()


def _separate_channels(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return images (n, height, width, channels) as (n, channels, height, width)."""
    count, height, width, channels = x.shape
    result = np.empty((count, channels, height, width), x.dtype)
    for start in range(0, count, BLOCK):  # one copy of everything at once would take twice the time or more
        block = slice(start, start + BLOCK)
        for channel in range(channels):
            result[block, channel] = x[block, :, :, channel]
    return result


def read_arrays(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Read x_train, y_train, x_test and y_test from a user's .npz file or folder of images with a sub-folder per class."""
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {path}")
    return images.read_folder(path) if path.is_dir() else cache.open_npz(path)


class MissingData(FileNotFoundError):  # noqa: N818
    """Complete sets are not in the data folder.

    Args:
        text: which, and how to get them.
        names: the sets.
    """

    def __init__(self, text: str, names: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.names = tuple(names)


def require(*names: str, data: str = "full") -> None:
    """Raise a FileNotFoundError that names the missing sets and how to get them, unless all of these sets are there."""
    for name in names:
        choose("data set", name, SETS)
    names = tuple(dict.fromkeys(names))
    if data == "sample":
        if missing := [name for name in names if name not in SAMPLES]:
            raise FileNotFoundError(
                f"there is no sample of {_and(missing)} in the package, only of {_and(SAMPLES)}; "
                "--data full uses the complete set"
            )
    elif missing := [name for name in names if not cache.place(name).is_file()]:
        raise MissingData(_advice(missing, names), missing)


def _advice(missing: Sequence[str], wanted: Sequence[str]) -> str:
    """Return one line that names the missing sets and all ways to get them."""
    free = [name for name in missing if SETS[name].files]
    ways = []
    if free:
        pronoun = "it" if len(free) == 1 else "them"
        ways.append(f"hatrack data get {' '.join(free)} downloads {pronoun if missing == free else _and(free)}")
    if closed := [name for name in missing if not SETS[name].files]:
        ways.append(f"{_and(closed)} can't be downloaded freely (see {SETS[closed[0]].home})")
    ways.append("hatrack data import FOLDER imports a copy that you have")
    ways.append("HATRACK_DATA sets another data folder")
    if set(wanted) <= set(SAMPLES):
        ways.append("--data sample uses the images that come with the package")
    paths = _and([str(cache.place(name)) for name in missing])
    return f"no full data for {_and(missing)} (there is no {paths}): {'; '.join(ways)}"


def _and(words: Sequence[str]) -> str:
    """Return "a", "a and b" or "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
