"""Single images and folders of them: opened, brought to the size of a set, and split into training and test."""

import logging
import math
import struct
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from hatrack.datasets.cache import Arrays, empty
from hatrack.datasets.catalog import DataSet

FORMATS = ("PNG", "JPEG", "PPM", "BMP", "GIF", "TIFF", "WEBP")  # some others start programs
SUFFIXES = {".png", ".jpg", ".jpeg", ".ppm", ".pgm", ".bmp", ".gif", ".tif", ".tiff", ".webp"}
PIXELS = 64_000_000  # the largest image that is opened
EMPTY = {  # two files of notMNIST (small) have no contents
    "RGVtb2NyYXRpY2FCb2xkT2xkc3R5bGUgQm9sZC50dGY=.png",
    "Q3Jvc3NvdmVyIEJvbGRPYmxpcXVlLnR0Zg==.png",
}
BROKEN = (  # what Pillow raises when a file is not as it should be
    OSError, ValueError, SyntaxError, EOFError, struct.error, Image.DecompressionBombError,
    TypeError, LookupError, ArithmeticError, AttributeError, MemoryError,
)  # fmt: skip
logging.getLogger("PIL").addHandler(logging.NullHandler())  # what it has to say, its errors say as well
IGNORED = "BACKGROUND_Google"  # in Caltech-101, pictures of no class
Image8 = np.ndarray[Any, np.dtype[np.uint8]]


@contextmanager
def opened(what: object, file: Path | IO[bytes]) -> Iterator[Image.Image]:
    """An image, or an error in one line. What Pillow finds odd but can read is good enough."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(file, formats=FORMATS) as image:
                if image.width * image.height > PIXELS:
                    raise ValueError(f"{image.width} x {image.height} pixels are too many")
                if image.mode.startswith(("I", "F")):  # Pillow would cut off what is above 255
                    raise ValueError("it has more than 8 bits per value; which of them matter, only you can say: convert it")
                yield image
    except BROKEN as error:
        said = "" if isinstance(error, UnidentifiedImageError) else f": {error}"
        raise ValueError(f"{what} is not a readable image{said}") from None


def picture(what: object, file: Path | IO[bytes], shape: Sequence[int]) -> Image8:
    """An image as an array of this shape, whole, resized (bilinear) and made gray or colour where needed."""
    size = (shape[1], shape[0])
    with opened(what, file) as found:
        image = found.convert("L" if len(shape) == 2 else "RGB")
        return np.asarray(image if image.size == size else image.resize(size, Image.Resampling.BILINEAR))


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


def files_in(path: Path) -> list[Path]:
    """All the images that `folder` reads."""
    both = (path / "train").is_dir() and (path / "test").is_dir()
    parts = [path / "train", path / "test"] if both else [path]
    return [file for part in parts for file in listed(part, class_folders(part, 0))[0]]


def class_folders(path: Path, classes: int) -> list[str]:
    """The names of the classes in their order: as numbers if all are, otherwise by the alphabet."""
    found = [p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith((".", "__")) and p.name != IGNORED]
    if classes and len(found) != classes:
        raise ValueError(f"{path} has {len(found)} sub-folders; {classes} are needed, one for every class")
    return sorted(found, key=int) if all(n.isdecimal() for n in found) else sorted(found)


def listed(path: Path, names: Sequence[str]) -> tuple[list[Path], Image8]:
    """All image files of the classes, and their labels."""
    if not names or len(names) > 256:
        raise ValueError(f"{path} has {len(names)} sub-folders; one is needed for every class, and 256 are the most")
    found: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        files = [p for p in sorted((path / name).rglob("*")) if p.suffix.lower() in SUFFIXES and not _passed_over(p)]
        if not files:  # said before the next class is read: this may be no folder of images at all
            raise ValueError(f"there are no images ({', '.join(sorted(SUFFIXES))}) in {path / name}")
        found += files
        labels += [label] * len(files)
    return found, np.array(labels, np.uint8)


def _passed_over(path: Path) -> bool:
    return path.name in EMPTY or path.name.startswith(".") or not path.is_file()


def common(files: Sequence[Path]) -> tuple[int, ...]:
    """The shape that all images have, or else 32 x 32; gray if all are gray."""
    sizes, modes = set(), set()
    for file in files:
        with opened(file, file) as image:
            sizes.add((image.height, image.width))
            modes.add(image.mode)
    size = sizes.pop() if len(sizes) == 1 else (32, 32)
    return size if modes <= {"1", "L"} else (*size, 3)


def arrays(files: Sequence[Path], shape: Sequence[int], limit: float) -> Image8:
    if len(files) > limit:  # before memory is taken
        raise ValueError(f"{len(files):,} images are more than the whole set could have")
    x = empty(f"{files[0].parent.parent}", (len(files), *shape))
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
