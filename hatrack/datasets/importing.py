"""Import sets that a user has: .npz files, published files, folders of images."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from hatrack.datasets import cache, images
from hatrack.datasets.archives import has_files, read_published
from hatrack.datasets.cache import Arrays, Note
from hatrack.datasets.catalog import PARTS, SETS
from hatrack.options import choose, nearest

ACCEPTED = (
    ".npz files named after their sets, the published files of a set (idx, .mat, archives), "
    "or a folder of images with a sub-folder per class"
)


class Candidate(NamedTuple):
    """Something in a user's folder that may be a set.

    Attributes:
        name: the set; "" if it is none.
        path: the file or folder.
        read: a function that reads it; None if it is skipped.
        reason: why it is skipped.
    """

    name: str
    path: Path
    read: Callable[[], Arrays] | None = None
    reason: str = ""


def bring_in(path: Path, name: str = "", replace: bool = False) -> Iterator[str]:
    """Import all sets in a file or folder into the data folder.

    Args:
        path: a file or folder.
        name: the set that it contains, if this cannot be seen from the names of the files.
        replace: replace other, undamaged images of the same set in the data folder.

    Yields:
        A line of text about every set that was found. If some could not be read, a ValueError at the end names them.
    """
    if name:
        choose("data set", name, SETS)
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {path}")
    found = find_candidates(path.resolve(), name)
    failures = []
    for one in found:
        try:
            yield f"{one.path.name}: skipped, {one.reason}" if one.read is None else import_one(one, one.read, replace)
        except (ValueError, OSError) as error:
            failures.append(str(error))
    if failures:
        raise ValueError("; ".join(failures))
    if all(one.read is None for one in found):
        raise ValueError(f"nothing to import in {path}: import accepts {ACCEPTED}")


def import_one(candidate: Candidate, read: Callable[[], Arrays], replace: bool) -> str:
    """Write one set to the data folder and return a line about it."""
    arrays, name = read(), candidate.name
    cache.check(f"{name} in {candidate.path}", arrays, SETS[name])
    with cache.locked(name):
        old = stored_digest(name)
        if old == cache.digest(arrays) and (note := cache.note(name)) is not None:
            return f"{name}: already there, {describe(name, note)}"
        if old and old != cache.digest(arrays) and not replace:
            raise ValueError(f"{cache.place(name)} has other images than {candidate.path}: --replace stores the new ones")
        return f"{name}: {describe(name, cache.keep(name, arrays, f'imported from {candidate.path}'))}"


def stored_digest(name: str) -> str:
    """Return the digest of the set in the data folder; "" if it is missing or damaged."""
    try:
        return cache.digest(cache.verified(name)) if cache.place(name).is_file() else ""
    except ValueError:
        return ""


def describe(name: str, note: Note) -> str:
    """Return the number of images as text, and whether they are the complete set or the published images."""
    spec = SETS[name]
    text = f"{note.train:,} + {note.test:,} images"
    if note.digest == spec.digest:
        return f"{text}, canonical"
    if note.train + note.test < spec.train + spec.test:
        return f"{text} of {spec.train:,} + {spec.test:,}"
    return text


# Finding sets


def find_candidates(path: Path, name: str) -> list[Candidate]:
    """Return everything in a file or folder that may be a set, or that may be the set `name`."""
    if path.is_file():
        return [required_npz(path, name)] if path.suffix == ".npz" else published_sets(path.parent, name, path.name)
    files = sorted(path.glob("*.npz"))
    if name and len(files) > 1:
        files = [p for p in files if p.stem == name] or [p for p in files if PARTS.get(p.stem) == name]
    found = [npz_by_name(p) for p in files] if not name else [required_npz(p, name) for p in files]
    found += [] if name and found else published_sets(path, name)
    if not found and any(p.is_dir() for p in path.iterdir()):
        return [image_folder(path, name)]
    return found


def required_npz(path: Path, name: str) -> Candidate:
    """Return the candidate of an .npz file that the user named; raise if it would be skipped."""
    one = Candidate(name, path, functools.partial(cache.read, path, name)) if name else npz_by_name(path)
    if one.read is None:
        raise ValueError(f"{path} was not imported: {one.reason}")
    return one


def npz_by_name(path: Path) -> Candidate:
    """Return the candidate of an .npz file, which is a set if the file is named after one."""
    if path.stem in SETS:
        return Candidate(path.stem, path, functools.partial(cache.read, path, path.stem))
    if whole := PARTS.get(path.stem):
        return Candidate("", path, reason=f"it is only a small part of {whole}; --name {whole} imports it nevertheless")
    return Candidate("", path, reason=f"no data set {path.stem!r}; {nearest(path.stem, SETS)}")


def published_sets(folder: Path, name: str, file: str = "") -> list[Candidate]:
    """Return the sets whose published files a folder has; if `file` is given, only those that it belongs to."""
    found = [n for n in SETS if has_files(folder, n) and name in ("", n)]
    if file:
        found = [n for n in found if belongs_to(file, n)]
        if not found:
            raise ValueError(
                f"{folder / file} is not a set, and {folder} does not have all published files of a set that it belongs to: "
                f"import accepts {ACCEPTED}"
            )
    if {"mnist", "fashion-mnist"} <= set(found):  # their files have the same names
        found = [n for n in found if n not in ("mnist", "fashion-mnist")] + [mnist_or_fashion(folder)]
    return [Candidate(n, folder, functools.partial(read_published, n, folder)) for n in found]


def belongs_to(file: str, name: str) -> bool:
    """Return whether a file is one of the published files of a set."""
    if name == "emnist-letters" and file.startswith("emnist-letters-"):
        return True
    return any(file in (f.name, f.name.removesuffix(".gz")) for f in SETS[name].files)


def mnist_or_fashion(folder: Path) -> str:
    """Return which of MNIST and Fashion-MNIST the idx files in a folder are, by the digest of their images."""
    digest = cache.digest(read_published("mnist", folder))
    for name in ("mnist", "fashion-mnist"):
        if digest == SETS[name].digest:
            return name
    raise ValueError(f"the idx files in {folder} may be of mnist or fashion-mnist: choose with --name")


def image_folder(path: Path, name: str) -> Candidate:
    """Return the candidate of a folder with a sub-folder of images per class."""
    name = name or path.name
    if name not in SETS:
        raise ValueError(f"{path} looks like a folder of images: name the set with --name; {nearest(name, SETS)}")
    spec = SETS[name]
    limit = 2 * (spec.train + spec.test)
    return Candidate(
        name, path, functools.partial(images.read_folder, path, spec.classes, spec.shape, spec.test_share, limit)
    )
