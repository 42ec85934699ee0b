"""Readers for the published files of every set, one function per format.

The files may be damaged or malicious. So archives are read in memory and never extracted to disk, nothing is unpickled
(CIFAR has a binary version), and sizes that a header states are checked before memory is allocated.
"""

import csv
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np

from hatrack.datasets import matfile
from hatrack.datasets.cache import Arrays, empty, fill
from hatrack.datasets.catalog import SETS, DataSet
from hatrack.datasets.idx import decompressed, read_idx
from hatrack.datasets.images import EMPTY, IGNORED, SUFFIXES, Image8, check_count, named_arrays, read_image, split
from hatrack.datasets.tarfiles import tar_members

BROKEN = (ValueError, KeyError, EOFError, OSError, RuntimeError, csv.Error, zlib.error, lzma.LZMAError, zipfile.BadZipFile,
          tarfile.TarError)  # fmt: skip
LETTERS = tuple(  # of the many files in EMNIST's archive
    f"emnist-letters-{part}-{kind}-ubyte.gz" for part in ("train", "test") for kind in ("images-idx3", "labels-idx1")
)
LARGEST_MEMBER = 100_000_000  # bytes: no single image or table is larger
UNPACKED = 2_000_000_000  # bytes: no archive is larger when decompressed


def read_published(name: str, folder: Path) -> Arrays:
    """Read a set from its published files.

    Args:
        name: the set, one of SETS.
        folder: the folder with its files, as they were published or decompressed.

    Returns:
        x_train, y_train, x_test and y_test, not yet checked by `cache.check`.
    """
    try:
        return READERS[name](folder, SETS[name])
    except FileNotFoundError:
        raise
    except BROKEN as error:
        reason = error.args[0] if isinstance(error, KeyError) else error
        raise ValueError(f"the files of {name} in {folder} can't be read: {reason}") from None


def find_file(folder: Path, name: str) -> Path:
    """Return the path of a published file, or of the same file decompressed."""
    for path in (folder / name, folder / name.removesuffix(".gz")):
        if path.is_file():
            return path
    raise FileNotFoundError(f"there is no {name} in {folder}")


def has_files(folder: Path, name: str) -> bool:
    """Return whether a folder has all published files of a set."""
    published = tuple(file.name for file in SETS[name].files)
    for names in (published, LETTERS if name == "emnist-letters" else ()):
        if names and all((folder / n).is_file() or (folder / n.removesuffix(".gz")).is_file() for n in names):
            return True
    return False


# idx: MNIST, Fashion-MNIST, EMNIST


def read_idx_files(open_: Callable[[str], IO[bytes]], names: tuple[str, str], spec: DataSet) -> Arrays:
    """Read the four files of a set: images and labels, for training and test; `names` are the beginnings of the names."""
    limit = 2 * (spec.train + spec.test)
    parts = []
    for prefix in names:
        pair = []
        for file, shape in ((f"{prefix}-images-idx3-ubyte.gz", spec.shape), (f"{prefix}-labels-idx1-ubyte.gz", ())):
            with open_(file) as packed, decompressed(packed) as raw:
                pair.append(read_idx(raw, file, shape, limit))
        parts.append((pair[0], pair[1]))
    return named_arrays(*parts)


def read_mnist(folder: Path, spec: DataSet) -> Arrays:
    """Read MNIST or Fashion-MNIST."""
    return read_idx_files(lambda name: find_file(folder, name).open("rb"), ("train", "t10k"), spec)


def read_emnist_letters(folder: Path, spec: DataSet) -> Arrays:
    """Read EMNIST letters; transpose the images, which are published transposed, and count labels from 0, not from 1."""
    names = ("emnist-letters-train", "emnist-letters-test")
    if (folder / "gzip.zip").is_file():
        with zipfile.ZipFile(folder / "gzip.zip") as file:
            arrays = read_idx_files(lambda name: file.open(f"gzip/{name}"), names, spec)
    else:
        arrays = read_idx_files(lambda name: find_file(folder, name).open("rb"), names, spec)
    for part in ("train", "test"):
        arrays[f"x_{part}"] = arrays[f"x_{part}"].swapaxes(1, 2)
        arrays[f"y_{part}"] = labels_from_one(arrays[f"y_{part}"], spec) - np.uint8(1)
    return arrays


def labels_from_one(y: np.ndarray[Any, Any], spec: DataSet) -> Image8:
    """Return labels as uint8; raise if they are not from 1 to the number of classes."""
    if not len(y) or not np.isin(y, np.arange(1, spec.classes + 1)).all():
        raise ValueError(f"its labels are not from 1 to {spec.classes}")
    return y.astype(np.uint8)


# Archives with one file per image, or a few large ones: CIFAR, notMNIST, Caltech-101, GTSRB


def read_cifar(path: Path, spec: DataSet, head: int, parts: dict[str, tuple[str, ...]]) -> Arrays:
    """Read a binary CIFAR archive, whose files consist of records: `head` label bytes, then 3 x 32 x 32 bytes.

    Args:
        path: the archive.
        spec: the set.
        head: the number of labels per image, of which the last one is used.
        parts: the names of the files for training and for test.
    """
    width, found = head + 3072, {}
    wanted = [name for names in parts.values() for name in names]
    with path.open("rb") as raw:
        for member, size, contents in tar_members(raw, UNPACKED):
            if member.name in wanted:
                check_count(member.name, size // width, spec)
                flat = empty(member.name, (size // width * width,))
                fill(contents, flat)
                found[member.name] = flat.reshape(-1, width)
    if missing := [name for name in wanted if name not in found]:
        raise ValueError(f"{path.name} has no {missing[0]}")
    both = [np.concatenate([found[name] for name in names]) for names in parts.values()]
    pairs = [(rows[:, head:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), rows[:, head - 1]) for rows in both]
    return named_arrays(*pairs)


def read_cifar10(folder: Path, spec: DataSet) -> Arrays:
    """Read CIFAR-10."""
    batches = tuple(f"data_batch_{k}.bin" for k in range(1, 6))
    return read_cifar(find_file(folder, "cifar-10-binary.tar.gz"), spec, 1, {"train": batches, "test": ("test_batch.bin",)})


def read_cifar100(folder: Path, spec: DataSet) -> Arrays:
    """Read CIFAR-100 with its fine labels."""
    return read_cifar(
        find_file(folder, "cifar-100-binary.tar.gz"), spec, 2, {"train": ("train.bin",), "test": ("test.bin",)}
    )


def read_image_archive(raw: IO[bytes], spec: DataSet) -> Arrays:
    """Read a .tar.gz with a folder of images per class, in the order of the names, and split off a test set."""
    found: dict[tuple[str, str], Image8] = {}
    for path, size, contents in tar_members(raw, UNPACKED):
        label = path.parent.name
        if path.suffix.lower() in SUFFIXES and path.name not in EMPTY and label != IGNORED and not path.name.startswith("."):
            check_size(str(path), size)
            check_count(path.name, len(found) + 1, spec)
            found[label, path.name] = read_image(str(path), io.BytesIO(contents.read()), spec.shape)
    order = sorted(found)
    classes = sorted({label for label, _ in order})
    if len(classes) != spec.classes:
        raise ValueError(f"it has images of {len(classes)} classes instead of {spec.classes}")
    y = np.array([classes.index(label) for label, _ in order], np.uint8)
    return split(np.stack([found[key] for key in order]), y, spec.test_share)


def check_size(what: str, size: int) -> None:
    """Raise if a member of an archive is larger than any file of a set."""
    if size > LARGEST_MEMBER:
        raise ValueError(f"{what} has {size:,} bytes, more than any file of this set")


def read_notmnist(folder: Path, spec: DataSet) -> Arrays:
    """Read notMNIST (small)."""
    with find_file(folder, "notMNIST_small.tar.gz").open("rb") as raw:
        return read_image_archive(raw, spec)


def read_caltech101(folder: Path, spec: DataSet) -> Arrays:
    """Read Caltech-101, a .tar.gz file within a .zip file."""
    with (
        zipfile.ZipFile(find_file(folder, "caltech-101.zip")) as file,
        file.open("caltech-101/101_ObjectCategories.tar.gz") as raw,
    ):
        return read_image_archive(raw, spec)


def read_gtsrb(folder: Path, spec: DataSet) -> Arrays:
    """Read whole frames, not only the signs.

    The training images are in the order of classes and tracks, the test images in the order of their names.
    """
    train, test, truth = (find_file(folder, file.name) for file in spec.files)
    with zipfile.ZipFile(train) as file:
        tables = sorted(n for n in file.namelist() if PurePosixPath(n).match("Final_Training/Images/*/GT-*.csv"))
        first = read_frames(file, [row for name in tables for row in read_table(file, name)], spec)
    with zipfile.ZipFile(test) as file, zipfile.ZipFile(truth) as answers:
        rows = read_table(answers, "GT-final_test.csv")
        paths = [(f"GTSRB/Final_Test/Images/{PurePosixPath(n).name}", label) for n, label in rows]
        second = read_frames(file, paths, spec)
    return named_arrays(first, second)


def read_table(file: zipfile.ZipFile, name: str) -> list[tuple[str, int]]:
    """Return the path and class of every image that a CSV table in the archive lists."""
    check_size(name, file.getinfo(name).file_size)
    rows = csv.DictReader(io.StringIO(file.read(name).decode("ascii")), delimiter=";", restval="")
    return [(str(PurePosixPath(name).parent / row["Filename"]), int(row["ClassId"])) for row in rows]


def read_frames(file: zipfile.ZipFile, rows: list[tuple[str, int]], spec: DataSet) -> tuple[Image8, Image8]:
    """Return the images and labels of these paths and classes."""
    check_count("it", len(rows), spec)
    sizes = [file.getinfo(name).file_size for name, _ in rows]
    if sum(sizes) > UNPACKED:
        raise ValueError(f"it decompresses to {sum(sizes):,} bytes, more than the whole set could have")
    x = empty("it", (len(rows), *spec.shape))
    for k, (name, _) in enumerate(rows):
        check_size(name, sizes[k])
        x[k] = read_image(name, io.BytesIO(file.read(name)), spec.shape)
    if any(not 0 <= label < spec.classes for _, label in rows):
        raise ValueError(f"a label is outside the {spec.classes} classes")
    return x, np.array([label for _, label in rows], np.uint8)


# MATLAB files: SVHN


def read_svhn(folder: Path, spec: DataSet) -> Arrays:
    """Read SVHN, where the label 10 stands for the digit 0."""
    limit = 2 * (spec.train + spec.test) * 3072
    parts = []
    for file in spec.files:
        found = matfile.read(find_file(folder, file.name), ("X", "y"), limit)
        if found["X"].dtype != np.uint8 or found["X"].shape[:3] != (32, 32, 3):
            raise ValueError(
                f"X of {file.name} is {found['X'].dtype} of shape {found['X'].shape}, not uint8 of 32 x 32 x 3 x n"
            )
        x = found["X"].reshape(32, 32, 3, -1).transpose(3, 0, 1, 2)
        parts.append((x, labels_from_one(found["y"].ravel(), spec) % np.uint8(10)))
    return named_arrays(*parts)


READERS: dict[str, Callable[[Path, DataSet], Arrays]] = {
    "mnist": read_mnist,
    "fashion-mnist": read_mnist,
    "notmnist": read_notmnist,
    "cifar10": read_cifar10,
    "cifar100": read_cifar100,
    "svhn": read_svhn,
    "gtsrb": read_gtsrb,
    "emnist-letters": read_emnist_letters,
    "caltech101": read_caltech101,
}
