"""Single images and folders of them: opened, brought to the size of a set, and split into training and test."""

import math
import struct
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from hatrack.benchmarks.cache import Arrays
from hatrack.benchmarks.sets import DataSet

FORMATS = ("PNG", "JPEG", "PPM", "BMP", "GIF", "TIFF", "WEBP")  # some others start programs
SUFFIXES = {".png", ".jpg", ".jpeg", ".ppm", ".pgm", ".bmp", ".gif", ".tif", ".tiff", ".webp"}
PIXELS = 64_000_000  # the largest image that is opened
EMPTY = {  # two files of notMNIST (small) have no contents
    "RGVtb2NyYXRpY2FCb2xkT2xkc3R5bGUgQm9sZC50dGY=.png",
    "Q3Jvc3NvdmVyIEJvbGRPYmxpcXVlLnR0Zg==.png",
}
IGNORED = "BACKGROUND_Google"  # in Caltech-101, pictures of no class
Image8 = np.ndarray[Any, np.dtype[np.uint8]]


def picture(what: object, file: Path | IO[bytes], shape: Sequence[int]) -> Image8:
    """An image as an array of this shape, whole, resized (bilinear) and made gray or colour where needed."""
    size = (shape[1], shape[0])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Pillow finds odd but can read is good enough
            with Image.open(file, formats=FORMATS) as opened:
                if opened.width * opened.height > PIXELS:
                    raise ValueError(f"{opened.width} x {opened.height} pixels are too many")
                image = opened.convert("L" if len(shape) == 2 else "RGB")
        return np.asarray(image if image.size == size else image.resize(size, Image.Resampling.BILINEAR))
    except (OSError, ValueError, SyntaxError, EOFError, struct.error, Image.DecompressionBombError) as error:
        raise unreadable(what, error) from None


def unreadable(what: object, error: Exception) -> ValueError:
    said = "" if isinstance(error, UnidentifiedImageError) else f": {error}"
    return ValueError(f"{what} is not a readable image{said}")


def folder(path: Path, classes: int = 0, shape: Sequence[int] = (), held: float = 0.1, limit: float = math.inf) -> Arrays:
    """A folder with a sub-folder of images for every class; or train/ and test/ with such sub-folders in each.

    Without a shape the images keep theirs; those of different sizes are brought to 32 x 32.
    """
    if not ((path / "train").is_dir() and (path / "test").is_dir()):
        files, labels = listed(path, class_folders(path, classes))
        return split(arrays(files, shape or common(files), limit), labels, held)
    names = class_folders(path / "train", classes)
    if unknown := sorted(set(class_folders(path / "test", 0)) - set(names)):
        raise ValueError(f"{path / 'test' / unknown[0]} has no counterpart in {path / 'train'}")
    parts = [listed(path / part, names) for part in ("train", "test")]
    shape = shape or common([file for files, _ in parts for file in files])
    train, test = ((arrays(files, shape, limit), labels) for files, labels in parts)
    return together(train, test)


def class_folders(path: Path, classes: int) -> list[str]:
    """The names of the classes in their order: as numbers if all are, otherwise by the alphabet."""
    found = [p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith((".", "__")) and p.name != IGNORED]
    if classes and len(found) != classes:
        raise ValueError(f"{path} has {len(found)} sub-folders; {classes} are needed, one for every class")
    return sorted(found, key=int) if all(n.isdecimal() for n in found) else sorted(found)


def listed(path: Path, names: Sequence[str]) -> tuple[list[Path], Image8]:
    """All image files of the classes, and their labels."""
    found, labels = [], []
    for label, name in enumerate(names):
        inside = sorted((path / name).rglob("*"))
        files = [p for p in inside if p.suffix.lower() in SUFFIXES and p.name not in EMPTY and not p.name.startswith(".")]
        found += files
        labels += [label] * len(files)
    counts = np.bincount(np.array(labels, int), minlength=len(names))
    if not counts.all() or not names:
        where = path / names[int(counts.argmin())] if names else path
        raise ValueError(f"there are no images ({', '.join(sorted(SUFFIXES))}) in {where}")
    if len(names) > 256:
        raise ValueError(f"{path} has {len(names)} sub-folders; labels are kept in one byte, so 256 classes are the most")
    return found, np.array(labels, np.uint8)


def common(files: Sequence[Path]) -> tuple[int, ...]:
    """The shape that all images have, or else 32 x 32; gray if all are gray."""
    sizes, modes = set(), set()
    for file in files:
        try:
            with Image.open(file, formats=FORMATS) as opened:
                sizes.add((opened.height, opened.width))
                modes.add(opened.mode)
        except (OSError, ValueError, SyntaxError) as error:
            raise unreadable(file, error) from None
    size = sizes.pop() if len(sizes) == 1 else (32, 32)
    return size if modes <= {"1", "L"} else (*size, 3)


def arrays(files: Sequence[Path], shape: Sequence[int], limit: float) -> Image8:
    if len(files) > limit:  # before memory is taken
        raise ValueError(f"{len(files):,} images are more than the whole set could have")
    x = np.empty((len(files), *shape), np.uint8)
    for row, file in enumerate(files):
        x[row] = picture(file, file, shape)
    return x


def check_count(what: str, count: int, spec: DataSet) -> None:
    """Before memory is taken: no copy of a set has more than twice its images."""
    if count > 2 * (spec.train + spec.test):
        raise ValueError(f"{what} has {count:,} images; the whole set has {spec.train + spec.test:,}")


def split(x: Image8, y: Image8, share: float) -> Arrays:
    """Hold out a share of every class as the test set: the same images every time."""
    draw = np.random.RandomState(0)
    test = np.zeros(len(y), bool)
    for label in range(int(y.max()) + 1):
        rows = np.flatnonzero(y == label)
        held = min(max(1, round(share * len(rows))), len(rows) - 1)  # both parts get one, if there are two
        test[draw.permutation(rows)[: max(0, held)]] = True
    return together((x[~test], y[~test]), (x[test], y[test]))


def together(train: tuple[Image8, Image8], test: tuple[Image8, Image8]) -> Arrays:
    return {"x_train": train[0], "y_train": train[1], "x_test": test[0], "y_test": test[1]}
