"""The work of `hatrack data get`, `verify` and `import`. Imported when one of them begins: it needs numpy."""

from collections.abc import Callable, Sequence
from pathlib import Path

from hatrack.datasets import cache, download, importing
from hatrack.datasets.catalog import SETS
from hatrack.options import choose
from hatrack.text import say


def get(names: Sequence[str], mirror: str, keep: bool) -> None:
    """Download sets.

    Args:
        names: the sets; or "all" alone, for those that can be downloaded.
        mirror: an address under which the published files lie; "" for their own.
        keep: keep the downloaded archives as well.
    """

    def one(name: str) -> str:
        note = download.get(name, mirror, keep)
        return "already there" if note is None else importing.describe(name, note)

    each([name for name, spec in SETS.items() if spec.files] if list(names) == ["all"] else known(names), one)


def verify(names: Sequence[str]) -> None:
    """Read sets in full and compare them with their digests; by default all that are there."""
    wanted = known(names) if names else [name for name in SETS if cache.place(name).is_file()]
    if not wanted:
        say(f"there are no sets in {cache.folder()}")
    each(wanted, verified)


def verified(name: str) -> str:
    """Return what a set is, or raise an error."""
    if not cache.place(name).is_file():
        raise FileNotFoundError(f"there is no {cache.place(name)}")
    arrays, note = cache.verified(name), cache.note(name)
    found = cache.Note(cache.digest(arrays), len(arrays["y_train"]), len(arrays["y_test"]), "", "")
    known_by = f"as {note.source} on {note.date}" if note else "put there by hand: counts, shapes and labels are good"
    return f"{importing.describe(name, found)}, {known_by}"


def bring_in(path: Path, name: str, replace: bool) -> None:
    """Import copies that the user has, and print a line for each.

    Args:
        path: a folder or file.
        name: the set it is, where that can't be seen.
        replace: replace a set that is already there.
    """
    for line in importing.bring_in(path, name, replace):
        say(line)


def known(names: Sequence[str]) -> list[str]:
    """Return the names, each once, or raise an error for one that is no set."""
    for name in names:
        choose("data set", name, SETS)
    return list(dict.fromkeys(names))


def each(names: Sequence[str], work: Callable[[str], str]) -> None:
    """Do the work for all names and print a line for each; fail at the end if some failed."""
    failures = []
    for name in names:
        try:
            say(f"{name}: {work(name)}")
        except (ValueError, OSError) as error:
            failures.append(error)
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise ValueError("; ".join(map(str, failures)))
