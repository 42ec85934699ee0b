"""`hatrack data`: what image sets are there, getting them, checking them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hatrack.datasets import cache
from hatrack.datasets.catalog import SETS
from hatrack.datasets.download import get as fetch
from hatrack.datasets.importing import bring_in, describe
from hatrack.options import choose
from hatrack.text import printable

app = typer.Typer(help="Image sets: what is there, getting more, checking them.", no_args_is_help=True)


@app.command("list")
def _list() -> None:
    """What is there and where, and what it would cost to get the rest."""
    table = Table("set", "classes", "images", "state", box=None, padding=(0, 2, 0, 0))
    for name, spec in SETS.items():
        table.add_row(name, str(spec.classes), f"{spec.train:,} + {spec.test:,}", state(name))
    print(f"data folder: {cache.folder()}")
    Console().print(table)


def state(name: str) -> str:
    """Here, with what is known of it; or how to get it."""
    spec = SETS[name]
    if not cache.place(name).is_file():
        return f"{megabytes(spec.size)} to download" if spec.files else "to be imported"
    try:
        note = cache.note(name)
    except ValueError:
        return "here, but its note is broken"
    size = megabytes(cache.place(name).stat().st_size)
    if note is None:
        return f"here, {size}, put there by hand"
    if note.train + note.test < spec.train + spec.test:
        return f"here, {size}, {note.train:,} + {note.test:,} of them"
    return f"here, {size}{', canonical' if note.digest == spec.digest else ''}"


def megabytes(size: int) -> str:
    return f"{max(1, round(size / 1e6)):,} MB"


@app.command("get")
def _get(
    names: Annotated[list[str], typer.Argument(help="the sets, or all", metavar="NAME...")],
    mirror: Annotated[
        str, typer.Option(help="address under which the published files lie", envvar="HATRACK_MIRROR", metavar="URL")
    ] = "",
    keep: Annotated[bool, typer.Option("--keep", help="keep the downloaded archives as well")] = False,
) -> None:
    """Download sets. What was finished before an interruption is not fetched again."""
    wanted = [name for name, spec in SETS.items() if spec.files] if names == ["all"] else known(names)

    def one(name: str) -> str:
        note = fetch(name, mirror, keep)
        return "already there" if note is None else describe(name, note)

    each(wanted, one)


@app.command("verify")
def _verify(
    names: Annotated[
        list[str] | None, typer.Argument(help="the sets (default: all that are there)", metavar="NAME...")
    ] = None,
) -> None:
    """Read sets in full and compare them with their digests."""
    wanted = known(names) if names else [name for name in SETS if cache.place(name).is_file()]
    if not wanted:
        print(f"there are no sets in {cache.folder()}")
    each(wanted, verify)


def verify(name: str) -> str:
    """What a set is, or an error."""
    if not cache.place(name).is_file():
        raise FileNotFoundError(f"there is no {cache.place(name)}")
    arrays, note = cache.verified(name), cache.note(name)
    found = cache.Note(cache.digest(arrays), len(arrays["y_train"]), len(arrays["y_test"]), "", "")
    known_by = f"as {note.source} on {note.date}" if note else "put there by hand: counts, shapes and labels are good"
    return f"{describe(name, found)}, {known_by}"


@app.command("import")
def _import(
    path: Annotated[Path, typer.Argument(help="a folder or file")],
    name: Annotated[str, typer.Option(help="the set it is, where that can't be seen", metavar="NAME")] = "",
    replace: Annotated[bool, typer.Option("--replace", help="replace a set that is already there")] = False,
) -> None:
    """Take copies that you have: .npz files, published files (idx, .mat, archives), or a folder of images per class."""
    for line in bring_in(path, name, replace):
        print(printable(line), flush=True)


def known(names: Sequence[str]) -> list[str]:
    for name in names:
        choose("data set", name, SETS)
    return list(dict.fromkeys(names))


def each(names: Sequence[str], work: Callable[[str], str]) -> None:
    """Do all, then fail if some failed, with a line for each on the way."""
    failures = []
    for name in names:
        try:
            print(f"{name}: {work(name)}", flush=True)
        except (ValueError, OSError) as error:
            failures.append(error)
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise ValueError("; ".join(map(str, failures)))


if __name__ == "__main__":
    app()
