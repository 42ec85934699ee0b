"""The published archives of every set as arrays. Members are read in memory, so that no archive can write anywhere;
nothing is unpickled (CIFAR has a binary version); sizes that a header states are checked before memory is taken."""

import csv
import gzip
import io
import lzma
import math
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, Self

import numpy as np

from hatrack.datasets import matfile
from hatrack.datasets.cache import Arrays, empty, fill
from hatrack.datasets.catalog import SETS, DataSet
from hatrack.datasets.images import EMPTY, IGNORED, SUFFIXES, Image8, check_count, picture, split, together

BROKEN = (ValueError, KeyError, EOFError, OSError, RuntimeError, csv.Error, zlib.error, lzma.LZMAError, zipfile.BadZipFile,
          tarfile.TarError)  # fmt: skip
LETTERS = tuple(  # of the many files in EMNIST's archive
    f"emnist-letters-{part}-{kind}-ubyte.gz" for part in ("train", "test") for kind in ("images-idx3", "labels-idx1")
)
MEMBER = 100_000_000  # bytes: no single image or table is larger
UNPACKED = 2_000_000_000  # bytes: no archive is larger when unpacked
REMARK = 100_000  # bytes
REMARKS = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)


def decode(name: str, folder: Path) -> Arrays:
    """The set from the folder in which its published files lie."""
    try:
        return DECODERS[name](folder, SETS[name])
    except FileNotFoundError:
        raise
    except BROKEN as error:
        said = error.args[0] if isinstance(error, KeyError) else error
        raise ValueError(f"the files of {name} in {folder} can't be read: {said}") from None


def find(folder: Path, name: str) -> Path:
    """A published file, or the same unpacked."""
    for path in (folder / name, folder / name.removesuffix(".gz")):
        if path.is_file():
            return path
    raise FileNotFoundError(f"there is no {name} in {folder}")


def has(folder: Path, name: str) -> bool:
    """Whether the published files of a set lie in a folder."""
    published = tuple(file.name for file in SETS[name].files)
    for names in (published, LETTERS if name == "emnist-letters" else ()):
        if names and all((folder / n).is_file() or (folder / n.removesuffix(".gz")).is_file() for n in names):
            return True
    return False


# idx: MNIST, Fashion-MNIST, EMNIST


def idx(raw: IO[bytes], what: str, shape: tuple[int, ...], limit: int) -> Image8:
    """Items of this shape from an idx file: type, dimensions, bytes."""
    head = raw.read(4)
    if head != bytes((0, 0, 8, len(shape) + 1)):
        raise ValueError(f"{what} is not an idx file of {len(shape) + 1} dimensions in bytes")
    sizes = [int.from_bytes(raw.read(4), "big") for _ in range(head[3])]
    if tuple(sizes[1:]) != shape or sizes[0] > limit:
        raise ValueError(f"{what} has the sizes {sizes}; at most {limit} items of shape {shape} were expected")
    flat = empty(what, (math.prod(sizes),))
    fill(raw, flat)
    return flat.reshape(sizes)


def four(open_: Callable[[str], IO[bytes]], names: tuple[str, str], spec: DataSet) -> Arrays:
    """Images and labels of the two parts; `names` are how the files of the parts begin."""
    limit = 2 * (spec.train + spec.test)
    parts = []
    for begin in names:
        pair = []
        for file, shape in ((f"{begin}-images-idx3-ubyte.gz", spec.shape), (f"{begin}-labels-idx1-ubyte.gz", ())):
            with open_(file) as packed, plain(packed) as raw:
                pair.append(idx(raw, file, shape, limit))
        parts.append((pair[0], pair[1]))
    return together(*parts)


def plain(raw: IO[bytes]) -> IO[bytes]:
    """The contents of a file that may be compressed."""
    begin = raw.read(2)
    raw.seek(0)
    return gzip.GzipFile(fileobj=raw) if begin == b"\x1f\x8b" else raw  # type: ignore[return-value]


def mnist(folder: Path, spec: DataSet) -> Arrays:
    return four(lambda name: find(folder, name).open("rb"), ("train", "t10k"), spec)


def emnist_letters(folder: Path, spec: DataSet) -> Arrays:
    """Upright (the published images are transposed), labels from 0 (they are from 1)."""
    names = ("emnist-letters-train", "emnist-letters-test")
    if (folder / "gzip.zip").is_file():
        with zipfile.ZipFile(folder / "gzip.zip") as file:
            arrays = four(lambda name: file.open(f"gzip/{name}"), names, spec)
    else:
        arrays = four(lambda name: find(folder, name).open("rb"), names, spec)
    for part in ("train", "test"):
        arrays[f"x_{part}"] = arrays[f"x_{part}"].swapaxes(1, 2)
        arrays[f"y_{part}"] = labels_from_one(arrays[f"y_{part}"], spec) - np.uint8(1)
    return arrays


def labels_from_one(y: np.ndarray[Any, Any], spec: DataSet) -> Image8:
    if not len(y) or not np.isin(y, np.arange(1, spec.classes + 1)).all():
        raise ValueError(f"its labels are not from 1 to {spec.classes}")
    return y.astype(np.uint8)


# Archives of single files: CIFAR, notMNIST, Caltech-101, GTSRB


class Header(tarfile.TarInfo):
    """Of a file in an archive. Long names and other remarks are read into memory whole, so their sizes are checked first."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        found = super().frombuf(buf, encoding, errors)
        if found.type in REMARKS and found.size > REMARK:
            raise ValueError(f"a remark of {found.size:,} bytes is too long")
        return found


class Whole(io.RawIOBase):
    """What a .gz file holds, up to a limit: a small file may unpack to any size."""

    def __init__(self, raw: IO[bytes], limit: int) -> None:
        self.file, self.left = gzip.GzipFile(fileobj=raw), limit

    def read(self, size: int = -1) -> bytes:
        found = self.file.read(min(size, self.left + 1) if size >= 0 else self.left + 1)
        self.left -= len(found)
        if self.left < 0:
            raise ValueError("it unpacks to more than the whole set could be")
        return found


def members(raw: IO[bytes], limit: int) -> Iterator[tuple[PurePosixPath, int, IO[bytes]]]:
    """Path, size and contents of the files in a .tar.gz, in the order in which they lie there."""
    whole = Whole(raw, limit)
    with tarfile.open(fileobj=whole, mode="r|", tarinfo=Header) as tar:
        for info in tar:
            contents = tar.extractfile(info) if info.isfile() else None
            if contents is not None:
                yield PurePosixPath(info.name), info.size, contents
    while whole.read(1 << 20):  # to the end, where gzip compares what it has read with a checksum
        pass


def cifar(path: Path, spec: DataSet, head: int, parts: dict[str, tuple[str, ...]]) -> Arrays:
    """Records of `head` label bytes, the last of which counts, and 3 x 32 x 32 bytes."""
    width, found = head + 3072, {}
    wanted = [name for names in parts.values() for name in names]
    with path.open("rb") as raw:
        for member, size, contents in members(raw, UNPACKED):
            if member.name in wanted:
                check_count(member.name, size // width, spec)
                flat = empty(member.name, (size // width * width,))
                fill(contents, flat)
                found[member.name] = flat.reshape(-1, width)
    if missing := [name for name in wanted if name not in found]:
        raise ValueError(f"{path.name} has no {missing[0]}")
    both = [np.concatenate([found[name] for name in names]) for names in parts.values()]
    pairs = [(rows[:, head:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), rows[:, head - 1]) for rows in both]
    return together(*pairs)


def cifar10(folder: Path, spec: DataSet) -> Arrays:
    batches = tuple(f"data_batch_{k}.bin" for k in range(1, 6))
    return cifar(find(folder, "cifar-10-binary.tar.gz"), spec, 1, {"train": batches, "test": ("test_batch.bin",)})


def cifar100(folder: Path, spec: DataSet) -> Arrays:
    return cifar(find(folder, "cifar-100-binary.tar.gz"), spec, 2, {"train": ("train.bin",), "test": ("test.bin",)})


def pictures(raw: IO[bytes], spec: DataSet) -> Arrays:
    """Images in a .tar.gz with a folder per class, in the order of their names, and our own split."""
    found: dict[tuple[str, str], Image8] = {}
    for path, size, contents in members(raw, UNPACKED):
        label = path.parent.name
        if path.suffix.lower() in SUFFIXES and path.name not in EMPTY and label != IGNORED and not path.name.startswith("."):
            check_member(str(path), size)
            check_count(path.name, len(found) + 1, spec)
            found[label, path.name] = picture(str(path), io.BytesIO(contents.read()), spec.shape)
    order = sorted(found)
    classes = sorted({label for label, _ in order})
    if len(classes) != spec.classes:
        raise ValueError(f"it has {len(classes)} classes of images instead of {spec.classes}")
    y = np.array([classes.index(label) for label, _ in order], np.uint8)
    return split(np.stack([found[key] for key in order]), y, spec.held)


def check_member(what: str, size: int) -> None:
    if size > MEMBER:
        raise ValueError(f"{what} has {size:,} bytes, more than any file of this set")


def notmnist(folder: Path, spec: DataSet) -> Arrays:
    with find(folder, "notMNIST_small.tar.gz").open("rb") as raw:
        return pictures(raw, spec)


def caltech101(folder: Path, spec: DataSet) -> Arrays:
    with (
        zipfile.ZipFile(find(folder, "caltech-101.zip")) as file,
        file.open("caltech-101/101_ObjectCategories.tar.gz") as raw,
    ):
        return pictures(raw, spec)


def gtsrb(folder: Path, spec: DataSet) -> Arrays:
    """Whole frames: the training images in the order of classes and tracks, the test images in the order of their names."""
    train, test, truth = (find(folder, file.name) for file in spec.files)
    with zipfile.ZipFile(train) as file:
        tables = sorted(n for n in file.namelist() if PurePosixPath(n).match("Final_Training/Images/*/GT-*.csv"))
        first = frames(file, [row for name in tables for row in table(file, name)], spec)
    with zipfile.ZipFile(test) as file, zipfile.ZipFile(truth) as answers:
        rows = table(answers, "GT-final_test.csv")
        second = frames(file, [(f"GTSRB/Final_Test/Images/{PurePosixPath(n).name}", label) for n, label in rows], spec)
    return together(first, second)


def table(file: zipfile.ZipFile, name: str) -> list[tuple[str, int]]:
    """The path and class of every image that a table lists."""
    check_member(name, file.getinfo(name).file_size)
    rows = csv.DictReader(io.StringIO(file.read(name).decode("ascii")), delimiter=";", restval="")
    return [(str(PurePosixPath(name).parent / row["Filename"]), int(row["ClassId"])) for row in rows]


def frames(file: zipfile.ZipFile, rows: list[tuple[str, int]], spec: DataSet) -> tuple[Image8, Image8]:
    check_count("it", len(rows), spec)
    sizes = [file.getinfo(name).file_size for name, _ in rows]
    if sum(sizes) > UNPACKED:
        raise ValueError(f"it unpacks to {sum(sizes):,} bytes, more than the whole set could be")
    x = empty("it", (len(rows), *spec.shape))
    for k, (name, _) in enumerate(rows):
        check_member(name, sizes[k])
        x[k] = picture(name, io.BytesIO(file.read(name)), spec.shape)
    if any(not 0 <= label < spec.classes for _, label in rows):
        raise ValueError(f"a label is outside the {spec.classes} classes")
    return x, np.array([label for _, label in rows], np.uint8)


# MATLAB files: SVHN


def svhn(folder: Path, spec: DataSet) -> Arrays:
    """The label 10 means the digit 0."""
    limit = 2 * (spec.train + spec.test) * 3072
    parts = []
    for file in spec.files:
        found = matfile.read(find(folder, file.name), ("X", "y"), limit)
        if found["X"].dtype != np.uint8 or found["X"].shape[:3] != (32, 32, 3):
            raise ValueError(
                f"X of {file.name} is {found['X'].dtype} of shape {found['X'].shape}, not uint8 of 32 x 32 x 3 x n"
            )
        x = found["X"].reshape(32, 32, 3, -1).transpose(3, 0, 1, 2)
        parts.append((x, labels_from_one(found["y"].ravel(), spec) % np.uint8(10)))
    return together(*parts)


DECODERS: dict[str, Callable[[Path, DataSet], Arrays]] = {
    "mnist": mnist,
    "fashion-mnist": mnist,
    "notmnist": notmnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "svhn": svhn,
    "gtsrb": gtsrb,
    "emnist-letters": emnist_letters,
    "caltech101": caltech101,
}
