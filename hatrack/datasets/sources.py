"""Where images come from: the samples that ship with the package, or complete sets from the data folder."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hatrack.datasets import cache, images
from hatrack.datasets.cache import folder
from hatrack.datasets.catalog import SAMPLES, SETS
from hatrack.options import Option, choose

__all__ = ["SETS", "Data", "Source", "Valid", "folder", "load", "read_arrays", "require"]

SHIPPED = Path(__file__).parent / "samples"

Data = Annotated[
    Literal["full", "sample"], Option("the complete set, or the 4,000 + 1,000 images that ship with the package")
]
Valid = Annotated[float, Option("share of the training set held out for validation", low=0, high=0.9)]


class Source(NamedTuple):
    """A data set: images (n, channels, height, width) in uint8 and labels in int64, for training and test."""

    classes: int
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def load(name: str, data: str = "full") -> Source:
    """A set by name. Loaded once, so that all tasks made from it share its images."""
    require(name, data=data)
    path = SHIPPED / f"{name}.npz" if data == "sample" else cache.place(name)
    beside = path.with_suffix(".json")
    files = [path, beside] if beside.exists() else [path]
    versions = tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in map(Path.stat, files))
    return _load(path, name, data, versions)


@functools.lru_cache(maxsize=16)
def _load(path: Path, name: str, data: str, versions: tuple[tuple[int, ...], ...]) -> Source:
    """`versions`: a file that was replaced is read anew."""
    arrays = cache.read(path, name) if data == "sample" else cache.verified(name)
    train, test = (_tensors(arrays[f"x_{part}"], arrays[f"y_{part}"]) for part in ("train", "test"))
    return Source(SETS[name].classes, train, test)


def _tensors(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> tuple[Tensor, Tensor]:
    raw = torch.from_numpy(x)
    raw = raw[:, None] if raw.dim() == 3 else raw.permute(0, 3, 1, 2).contiguous()
    return raw, torch.from_numpy(y).long()


def read_arrays(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """x_train, y_train, x_test and y_test of a user's own .npz file or folder of images with a sub-folder per class."""
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {path}")
    return images.folder(path) if path.is_dir() else cache.open_npz(path)


def require(*names: str, data: str = "full") -> None:
    """Nothing if all of these sets are at hand; otherwise one error that names those that are missing and what to do."""
    for name in names:
        choose("data set", name, SETS)
    names = tuple(dict.fromkeys(names))
    if data == "sample":
        if missing := [name for name in names if name not in SAMPLES]:
            raise FileNotFoundError(
                f"no sample of {_and(missing)} ships with the package, only of {_and(SAMPLES)}; "
                "--data full takes the complete set"
            )
    elif missing := [name for name in names if not cache.place(name).is_file()]:
        raise FileNotFoundError(_advice(missing, names))


def _advice(missing: Sequence[str], wanted: Sequence[str]) -> str:
    free = [name for name in missing if SETS[name].files]
    ways = []
    if free:
        all_of_them = "it" if len(free) == 1 else "them"
        ways.append(f"hatrack data get {' '.join(free)} downloads {all_of_them if missing == free else _and(free)}")
    if closed := [name for name in missing if not SETS[name].files]:
        ways.append(f"{_and(closed)} can't be downloaded freely (see {SETS[closed[0]].home})")
    ways.append("hatrack data import FOLDER takes a copy that you have")
    ways.append("HATRACK_DATA can name another folder")
    if set(wanted) <= set(SAMPLES):
        ways.append("--data sample runs on the images that ship with the package")
    paths = _and([str(cache.place(name)) for name in missing])
    return f"no full data for {_and(missing)} (there is no {paths}): {'; '.join(ways)}"


def _and(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
