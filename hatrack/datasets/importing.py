"""Copies that a user has: .npz files, the published files of a set, folders of images."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from hatrack.datasets import cache, images
from hatrack.datasets.archives import decode, has
from hatrack.datasets.cache import Arrays, Note
from hatrack.datasets.catalog import PARTS, SETS
from hatrack.options import choose, nearest

TAKEN = (
    ".npz files named after their sets, the published files of a set (idx, .mat, archives), "
    "or a folder of images with a sub-folder per class"
)


class Copy(NamedTuple):
    """A set that was found, and how to read it; without a name, why it is passed over."""

    name: str
    place: Path
    read: Callable[[], Arrays] | None = None
    why: str = ""


def bring_in(path: Path, name: str = "", replace: bool = False) -> Iterator[str]:
    """Import all sets in a file or folder, telling of each; in the end an error tells what could not be read.

    Nothing in the data folder is replaced unless asked for or broken.
    """
    if name:
        choose("data set", name, SETS)
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {path}")
    found = copies(path.resolve(), name)
    failures = []
    for copy in found:
        try:
            yield f"{copy.place.name}: passed over, {copy.why}" if copy.read is None else take(copy, copy.read, replace)
        except (ValueError, OSError) as error:
            failures.append(str(error))
    if failures:
        raise ValueError("; ".join(failures))
    if all(copy.read is None for copy in found):
        raise ValueError(f"nothing to import in {path}: it takes {TAKEN}")


def take(copy: Copy, read: Callable[[], Arrays], replace: bool) -> str:
    """Put one set in the data folder and say what it is."""
    arrays, name = read(), copy.name
    cache.check(f"{name} in {copy.place}", arrays, SETS[name])
    with cache.locked(name):
        old = stored(name)
        if old == cache.digest(arrays) and (noted := cache.note(name)) is not None:
            return f"{name}: already there, {describe(name, noted)}"
        if old and old != cache.digest(arrays) and not replace:
            raise ValueError(f"{cache.place(name)} has other images than {copy.place}: --replace takes the new ones")
        return f"{name}: {describe(name, cache.keep(name, arrays, f'imported from {copy.place}'))}"


def stored(name: str) -> str:
    """The digest of what the data folder has; nothing if it is missing or broken."""
    try:
        return cache.digest(cache.verified(name)) if cache.place(name).is_file() else ""
    except ValueError:
        return ""


def describe(name: str, note: Note) -> str:
    """How many images there are, and whether that is all of them."""
    spec = SETS[name]
    text = f"{note.train:,} + {note.test:,} images"
    if note.digest == spec.digest:
        return f"{text}, canonical"
    if note.train + note.test < spec.train + spec.test:
        return f"{text} of {spec.train:,} + {spec.test:,}"
    return text


# What is there


def copies(path: Path, name: str) -> list[Copy]:
    """All sets in a file or folder, or the one that was named."""
    if path.is_file():
        return [one_npz(path, name)] if path.suffix == ".npz" else published(path.parent, name, path.name)
    files = sorted(path.glob("*.npz"))
    if name and len(files) > 1:
        files = [p for p in files if p.stem == name] or [p for p in files if PARTS.get(p.stem) == name]
    found = [in_folder(p) for p in files] if not name else [one_npz(p, name) for p in files]
    found += [] if name and found else published(path, name)
    if not found and any(p.is_dir() for p in path.iterdir()):
        return [image_folder(path, name)]
    return found


def one_npz(path: Path, name: str) -> Copy:
    """A file that was pointed at must be importable."""
    copy = Copy(name, path, functools.partial(cache.read, path, name)) if name else in_folder(path)
    if copy.read is None:
        raise ValueError(f"{path} was not imported: {copy.why}")
    return copy


def in_folder(path: Path) -> Copy:
    if path.stem in SETS:
        return Copy(path.stem, path, functools.partial(cache.read, path, path.stem))
    if whole := PARTS.get(path.stem):
        return Copy("", path, why=f"it is only a small part of {whole}; --name {whole} takes it all the same")
    return Copy("", path, why=f"no data set {path.stem!r}; {nearest(path.stem, SETS)}")


def published(folder: Path, name: str, file: str = "") -> list[Copy]:
    """Sets whose published files lie in a folder; with `file` only those it is one of."""
    found = [n for n in SETS if has(folder, n) and name in ("", n)]
    if file:
        found = [n for n in found if belongs(file, n)]
        if not found:
            raise ValueError(f"{folder / file} is not a set, nor part of one that lies there: import takes {TAKEN}")
    if {"mnist", "fashion-mnist"} <= set(found):  # files of the same names
        found = [n for n in found if n not in ("mnist", "fashion-mnist")] + [digits_or_clothes(folder)]
    return [Copy(n, folder, functools.partial(decode, n, folder)) for n in found]


def belongs(file: str, name: str) -> bool:
    if name == "emnist-letters" and file.startswith("emnist-letters-"):
        return True
    return any(file in (f.name, f.name.removesuffix(".gz")) for f in SETS[name].files)


def digits_or_clothes(folder: Path) -> str:
    digest = cache.digest(decode("mnist", folder))
    for name in ("mnist", "fashion-mnist"):
        if digest == SETS[name].digest:
            return name
    raise ValueError(f"the idx files in {folder} may be of mnist or fashion-mnist: --name says which")


def image_folder(path: Path, name: str) -> Copy:
    name = name or path.name
    if name not in SETS:
        raise ValueError(f"{path} looks like a folder of images: --name says of which set; {nearest(name, SETS)}")
    spec = SETS[name]
    limit = 2 * (spec.train + spec.test)
    return Copy(name, path, functools.partial(images.folder, path, spec.classes, spec.shape, spec.held, limit))
