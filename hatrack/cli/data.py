"""`hatrack data`: what image sets are there; getting, checking and importing them."""

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from hatrack.cli.group import LazyGroup, imported_when_called
from hatrack.cli.options import FOLDER, beginning
from hatrack.datasets.catalog import SETS
from hatrack.datasets.folder import folder, note, place
from hatrack.registry import Entry, Registry
from hatrack.text import say

_get = imported_when_called("hatrack.cli.image_sets:get")
_verify = imported_when_called("hatrack.cli.image_sets:verify")
_bring_in = imported_when_called("hatrack.cli.image_sets:bring_in")
TITLES = {name: spec.title for name, spec in SETS.items()}


COMMANDS: Registry[click.Command] = Registry("command", {
    "list": Entry("hatrack.cli.data:list_sets", "Show what is there and where, and what it would cost to get the rest."),
    "get": Entry("hatrack.cli.data:get", "Download sets. What was finished before an interruption is not fetched again."),
    "verify": Entry("hatrack.cli.data:verify", "Read sets in full and compare them with their digests."),
    "import": Entry(
        "hatrack.cli.data:import_sets",
        "Take copies that you have: .npz files, published files (idx, .mat, archives), or a folder of images per class.",
    ),
})  # fmt: skip
command = LazyGroup("data", "Image sets: show what is there, get more, check them.", COMMANDS)


@click.command("list")
def list_sets() -> None:
    """Show what is there and where, and what it would cost to get the rest."""
    table = Table("set", "classes", "images", "state", box=None, padding=(0, 2, 0, 0))
    for name, spec in SETS.items():
        table.add_row(name, str(spec.classes), f"{spec.train:,} + {spec.test:,}", state(name))
    say(f"data folder: {folder()}")
    Console().print(table)


def state(name: str) -> str:
    """Return what is known of a set that is here; or how to get it."""
    spec = SETS[name]
    if not place(name).is_file():
        unsure = "" if spec.digest else ", checksums never compared with the real files"
        return f"{megabytes(spec.size)} to download{unsure}" if spec.files else "to be imported"
    try:
        noted = note(name)
    except ValueError:
        return "here, but its note is broken"
    size = megabytes(place(name).stat().st_size)
    if noted is None:
        return f"here, {size}, put there by hand"
    if noted.train + noted.test < spec.train + spec.test:
        return f"here, {size}, {noted.train:,} + {noted.test:,} of them"
    return f"here, {size}{', canonical' if noted.digest == spec.digest else ''}"


def megabytes(size: int) -> str:
    """Return a size in bytes as a text."""
    return f"{max(1, round(size / 1e6)):,} MB"


@click.command("get")
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=beginning({"all": "", **TITLES}))
@click.option(
    "--mirror",
    default="",
    envvar="HATRACK_MIRROR",
    metavar="URL",
    help="address under which the published files lie [$HATRACK_MIRROR]",
)
@click.option("--keep", is_flag=True, help="keep the downloaded archives as well")
def get(names: tuple[str, ...], mirror: str, keep: bool) -> None:
    """Download sets. What was finished before an interruption is not fetched again.

    NAME is a set, or all.
    """
    _get(names, mirror, keep)


@click.command("verify")
@click.argument("names", nargs=-1, metavar="[NAME...]", shell_complete=beginning(TITLES))
def verify(names: tuple[str, ...]) -> None:
    """Read sets in full and compare them with their digests.

    NAME is a set; by default all that are there.
    """
    _verify(names)


@click.command("import")
@click.argument("path", type=FOLDER)
@click.option(
    "--name",
    default="",
    metavar="NAME",
    help="the set it is, where that can't be seen",
    shell_complete=beginning(TITLES),
)
@click.option("--replace", is_flag=True, help="replace a set that is already there")
def import_sets(path: Path, name: str, replace: bool) -> None:
    """Take copies that you have: .npz files, published files (idx, .mat, archives), or a folder of images per class.

    PATH is a folder or file.
    """
    _bring_in(path, name, replace)
