"""Read images and folders of images, resize them to the shape of a set, and split them into training and test."""

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
from hatrack.files.limits import check_image, check_unpacked

FORMATS = ("PNG", "JPEG", "PPM", "BMP", "GIF", "TIFF", "WEBP")  # for some others Pillow starts external programs
SUFFIXES = {".png", ".jpg", ".jpeg", ".ppm", ".pgm", ".bmp", ".gif", ".tif", ".tiff", ".webp"}
PIXELS = 64_000_000  # the largest image that is opened
EMPTY = {  # two files of notMNIST (small) have no contents
    "RGVtb2NyYXRpY2FCb2xkT2xkc3R5bGUgQm9sZC50dGY=.png",
    "Q3Jvc3NvdmVyIEJvbGRPYmxpcXVlLnR0Zg==.png",
}
BROKEN = (  # what Pillow raises for damaged files
    OSError, ValueError, SyntaxError, EOFError, struct.error, Image.DecompressionBombError,
    TypeError, LookupError, ArithmeticError, AttributeError, MemoryError,
)  # fmt: skip
logging.getLogger("PIL").addHandler(logging.NullHandler())  # its errors contain the same information
IGNORED = "BACKGROUND_Google"  # the folder of Caltech-101 with images of no class
Image8 = np.ndarray[Any, np.dtype[np.uint8]]


@contextmanager
def open_image(what: object, file: Path | IO[bytes]) -> Iterator[Image.Image]:
    """Open an image; raise a ValueError that names it (`what`) if this fails. Warnings of Pillow are ignored."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(file, formats=FORMATS) as image:
                if image.width * image.height > PIXELS:
                    raise ValueError(f"it has {image.width} x {image.height} pixels, more than {PIXELS:,}")
                if image.mode.startswith(("I", "F")):  # Pillow would clip values above 255
                    raise ValueError("it has more than 8 bits per value; convert it to 8 bits first")
                yield image
    except BROKEN as error:
        reason = "" if isinstance(error, UnidentifiedImageError) else f": {error}"
        raise ValueError(f"{what} is not a readable image{reason}") from None


def read_image(what: object, file: Path | IO[bytes], shape: Sequence[int]) -> Image8:
    """Read an image, resized (bilinear, not cropped) and converted to gray or colour.

    Args:
        what: its name, for error messages.
        file: a path or an open file.
        shape: (height, width) for a gray image, (height, width, 3) for a colour image.
    """
    size = (shape[1], shape[0])
    with open_image(what, file) as found:
        image = found.convert("L" if len(shape) == 2 else "RGB")
        return np.asarray(image if image.size == size else image.resize(size, Image.Resampling.BILINEAR))


def read_folder(
    path: Path, classes: int = 0, shape: Sequence[int] = (), test_share: float = 0.1, limit: float = math.inf
) -> Arrays:
    """Read a folder with a sub-folder of images for every class, or with train/ and test/ that have such sub-folders.

    Args:
        path: the folder.
        classes: the number of classes that it must have; 0: any.
        shape: the shape of the result, see `read_image`. If it is empty, images of one size keep their size, and images of
            different sizes are resized to 32 x 32.
        test_share: the share of every class that becomes the test set if there is no folder test/.
        limit: the largest number of images that is accepted.

    Returns:
        x_train, y_train, x_test and y_test, all uint8.
    """
    if not ((path / "train").is_dir() and (path / "test").is_dir()):
        files, labels = list_images(path, class_folders(path, classes))
        return split(read_images(files, shape or common_shape(files), limit), labels, test_share)
    names = class_folders(path / "train", classes)
    if unknown := sorted(set(class_folders(path / "test", 0)) - set(names)):
        raise ValueError(f"{path / 'test' / unknown[0]} has no counterpart in {path / 'train'}")
    parts = [list_images(path / part, names) for part in ("train", "test")]
    shape = shape or common_shape([file for files, _ in parts for file in files])
    train, test = ((read_images(files, shape, limit), labels) for files, labels in parts)
    return named_arrays(train, test)


def image_files(path: Path) -> list[Path]:
    """Return the paths of all images that `read_folder` reads."""
    both = (path / "train").is_dir() and (path / "test").is_dir()
    parts = [path / "train", path / "test"] if both else [path]
    return [file for part in parts for file in list_images(part, class_folders(part, 0))[0]]


def class_folders(path: Path, classes: int) -> list[str]:
    """Return the names of the class folders, sorted by number if all are numbers, otherwise alphabetically."""
    found = [p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith((".", "__")) and p.name != IGNORED]
    if classes and len(found) != classes:
        raise ValueError(f"{path} has {len(found)} sub-folders; {classes} are needed, one for every class")
    return sorted(found, key=int) if all(n.isdecimal() for n in found) else sorted(found)


def list_images(path: Path, names: Sequence[str]) -> tuple[list[Path], Image8]:
    """Return the image files in these class folders, and their labels."""
    if not names or len(names) > 256:
        raise ValueError(f"{path} has {len(names)} sub-folders; it needs one for every class, at most 256")
    found: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        files = [p for p in sorted((path / name).rglob("*")) if p.suffix.lower() in SUFFIXES and not _is_skipped(p)]
        if not files:  # raised before the next folder is searched: this may be no folder of images at all
            raise ValueError(f"there are no images ({', '.join(sorted(SUFFIXES))}) in {path / name}")
        found += files
        labels += [label] * len(files)
    return found, np.array(labels, np.uint8)


def _is_skipped(path: Path) -> bool:
    return path.name in EMPTY or path.name.startswith(".") or not path.is_file()


def common_shape(files: Sequence[Path]) -> tuple[int, ...]:
    """Return the size that all images have, otherwise 32 x 32; with 3 channels unless all images are gray."""
    sizes, modes = set(), set()
    for file in files:
        with open_image(file, file) as image:
            sizes.add((image.height, image.width))
            modes.add(image.mode)
    size = sizes.pop() if len(sizes) == 1 else (32, 32)
    return size if modes <= {"1", "L"} else (*size, 3)


def read_images(files: Sequence[Path], shape: Sequence[int], limit: float) -> Image8:
    """Return all images in one array; raise before memory is allocated if there are more than `limit`."""
    if len(files) > limit:
        raise ValueError(f"{len(files):,} images are more than the whole set could have")
    folder = f"{files[0].parent.parent}"
    check_image(folder, tuple(shape))
    check_unpacked(folder, len(files) * math.prod(shape), sum(file.stat().st_size for file in files))
    x = empty(folder, (len(files), *shape))
    for row, file in enumerate(files):
        x[row] = read_image(file, file, shape)
    return x


def check_count(what: str, count: int, spec: DataSet) -> None:
    """Raise if a file claims more than twice the images of the set; call it before memory is allocated."""
    if count > 2 * (spec.train + spec.test):
        raise ValueError(f"{what} has {count:,} images; the whole set has {spec.train + spec.test:,}")


def split(x: Image8, y: Image8, share: float) -> Arrays:
    """Split off a share of every class as the test set; the choice is the same every time."""
    draw = np.random.RandomState(0)
    test = np.zeros(len(y), bool)
    for label in range(int(y.max()) + 1):
        rows = np.flatnonzero(y == label)
        held = min(max(1, round(share * len(rows))), len(rows) - 1)  # if a class has two images, both parts get one
        test[draw.permutation(rows)[: max(0, held)]] = True
    return named_arrays((x[~test], y[~test]), (x[test], y[test]))


def named_arrays(train: tuple[Image8, Image8], test: tuple[Image8, Image8]) -> Arrays:
    """Return images and labels of training and test as x_train, y_train, x_test and y_test."""
    return {"x_train": train[0], "y_train": train[1], "x_test": test[0], "y_test": test[1]}
