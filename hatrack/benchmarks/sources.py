"""Where images come from: the samples that ship with the package, or complete sets from the data folder."""

import functools
import os
import zipfile
import zlib
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from torch import Tensor

from hatrack.options import Option, choose
from hatrack.task import check_labels, store

SAMPLES = Path(__file__).parent / "samples"
SHAPE = (28, 28)
CLASSES = {"mnist": 10, "fashion-mnist": 10}
ARRAYS = ("x_train", "y_train", "x_test", "y_test")

Data = Annotated[
    Literal["full", "sample"], Option("the complete set, or the 4,000 + 1,000 images that ship with the package")
]
Valid = Annotated[float, Option("share of the training set held out for validation", low=0, high=0.9)]


class Source(NamedTuple):
    """A data set: images (n, channels, height, width) in uint8 and labels, for training and test."""

    classes: int
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def folder() -> Path:
    """Where complete sets lie: $HATRACK_DATA, or the user's cache folder."""
    if os.environ.get("HATRACK_DATA"):
        return Path(os.environ["HATRACK_DATA"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hatrack"


def load(name: str, data: str = "full") -> Source:
    """A set by name. Loaded once, so that all tasks made from it share its images."""
    choose("data set", name, CLASSES)
    path = (SAMPLES if data == "sample" else folder()) / f"{name}.npz"
    if not path.is_file():
        raise FileNotFoundError(
            f"the full {name} data is not at {path}: put an .npz file with {', '.join(ARRAYS)} (uint8) there, "
            "or set HATRACK_DATA to the folder that has it; --data sample runs on the images that ship with the package"
        )
    return _read(path, name, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=16)
def _read(path: Path, name: str, changed: int) -> Source:
    try:
        # opened here, because numpy leaves a broken file open; an array by itself is refused by `zipfile`
        with path.open("rb") as raw, zipfile.ZipFile(raw), np.load(raw, allow_pickle=False) as file:
            arrays = {key: file[key] for key in ARRAYS}
    except (OSError, ValueError, KeyError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a readable data file with {', '.join(ARRAYS)}: {error}") from None
    for key, array in arrays.items():
        if array.dtype != np.uint8:
            raise ValueError(f"{path}: {key} must be uint8, not {array.dtype}")
    for key in ("x_train", "x_test"):
        if arrays[key].shape[1:] != SHAPE:
            raise ValueError(f"{path}: {key} must be images of shape {SHAPE}, not {arrays[key].shape[1:]}")
    train = store(f"{path}, training", arrays["x_train"], arrays["y_train"])
    test = store(f"{path}, test", arrays["x_test"], arrays["y_test"])
    for part, (_, labels) in (("training", train), ("test", test)):
        check_labels(f"{path}, {part}", labels, CLASSES[name], every=part == "training")
    return Source(CLASSES[name], train, test)
