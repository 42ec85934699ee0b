"""Download a set: get its published files, check their checksums, and write the arrays to the data folder."""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from hatrack.datasets import cache
from hatrack.datasets.archives import read_published
from hatrack.datasets.catalog import SETS, File
from hatrack.datasets.fetch import Refused, fetch
from hatrack.files.atomic import check_own_folder
from hatrack.options import choose
from hatrack.text import say

ATTEMPTS = 3  # in each, all addresses of a file are tried
PAUSE = 1.0  # seconds before the second attempt; twice as many before the third


def get(name: str, mirror: str = "", keep: bool = False) -> cache.Note | None:
    """Download a set into the data folder.

    Files that are downloaded completely stay until the set is complete, so a second call continues where the first stopped.

    Args:
        name: the set, one of SETS.
        mirror: the address of a folder that has the published files; "": $HATRACK_MIRROR, or the publisher's addresses.
        keep: keep the downloaded archives as well.

    Returns:
        The metadata of the set; None if it was already there.
    """
    choose("data set", name, SETS)
    if not SETS[name].files:
        raise ValueError(
            f"{name} can't be downloaded freely: request it at {SETS[name].home}, put the images of each of its "
            f"{SETS[name].classes} classes in a sub-folder, then run hatrack data import FOLDER --name {name}"
        )
    with cache.locked(name):
        if is_complete(name):
            return None
        archives = cache.folder() / "downloads" / name
        with cache.room(name):
            download_files(name, archives, mirror or os.environ.get("HATRACK_MIRROR", ""))
        note = store(name, archives)
        if not keep:
            shutil.rmtree(archives, ignore_errors=True)
            with contextlib.suppress(OSError):
                archives.parent.rmdir()  # unless another set has files there
        return note


def is_complete(name: str) -> bool:
    """Return whether the data folder has the set, undamaged; print a line if it is damaged."""
    if not cache.place(name).is_file():
        return False
    try:
        cache.verified(name)
    except ValueError as error:
        say(f"{error}; downloading it again", sys.stderr)
        return False
    return True


def store(name: str, archives: Path) -> cache.Note:
    """Read the published files and write the set to the data folder; raise if it is not the complete set."""
    spec, arrays = SETS[name], read_published(name, archives)
    counts = (len(arrays["y_train"]), len(arrays["y_test"]))
    if counts != (spec.train, spec.test):
        wanted = f"{spec.train:,} + {spec.test:,}"
        raise ValueError(
            f"the files of {name} contain {counts[0]:,} + {counts[1]:,} images instead of {wanted}; nothing was stored"
        )
    if spec.digest and cache.digest(arrays) != spec.digest:
        raise ValueError(f"the images of {name} are not the published ones (their digest differs); nothing was stored")
    return cache.keep(name, arrays, "downloaded")


# Files


def download_files(name: str, folder: Path, mirror: str = "") -> None:
    """Download the published files of a set, except those that the folder already has."""
    if mirror and not mirror.startswith(("http://", "https://")):
        raise ValueError(f"mirror must be an address such as https://example.org/data, not {mirror!r}")
    for own in (folder.parent, folder):  # where files are removed
        check_own_folder(own)
    folder.mkdir(parents=True, exist_ok=True)
    for stray in folder.glob("tmp*"):  # left by a download that was killed
        stray.unlink(missing_ok=True)
    for file in SETS[name].files:
        addresses = [(mirror.rstrip("/") + "/" if mirror else base) + file.name for base in file.bases]
        with progress_bar(f"{name}: {file.name}") as progress:
            download_file(file, list(dict.fromkeys(addresses)), folder, progress)


def download_file(file: File, addresses: list[str], folder: Path, progress: Any = False) -> None:
    """Download one file from the first address that has it; try several times, because servers fail now and then."""
    pooch, requests = import_pooch()
    for attempt in range(ATTEMPTS):
        time.sleep(PAUSE * attempt)
        reasons, final = [], True
        for address in addresses:
            try:
                pooch.retrieve(address, file.checksum, fname=file.name, path=folder, downloader=fetch(file.size, progress))
                return
            except requests.RequestException as error:
                reasons.append(f"{address}: {describe_error(error)}")
                status = getattr(error.response, "status_code", 0)
                final = final and 400 <= status < 500  # the file does not exist; trying again does not help
            except Refused as error:  # trying again would take as long
                reasons.append(f"{address}: {error}")
            except ValueError:
                reasons.append(f"{address}: this is not the published file (its {file.checksum.replace(':', ' is not ')})")
                final = False
        if final:
            break
    raise OSError(f"could not download {file.name}: {'; '.join(reasons)}. --mirror URL sets another address")


def import_pooch() -> tuple[Any, Any]:
    """Import pooch and requests here, so that everything except downloads works without them."""
    try:
        import pooch  # type: ignore[import-untyped]
        import requests
    except ImportError:
        raise OSError("downloads need the package pooch: pip install pooch; or hatrack data import FOLDER") from None
    pooch.get_logger().setLevel("ERROR")
    return pooch, requests


def describe_error(error: Exception) -> str:
    """Return the cause of a failed request in a few words."""
    response = getattr(error, "response", None)
    if response is not None:
        return f"{response.status_code} {response.reason}"
    text = str(error)
    for part, meaning in (
        ("IncompleteRead", "the connection was lost"),
        ("timed out", "the server did not answer in time"),
        ("Failed to resolve", "no such host, or no network"),
        ("NameResolutionError", "no such host, or no network"),
        ("refused", "connection refused"),
        ("Connection aborted", "the connection was lost"),
    ):
        if part in text:
            return meaning
    return " ".join(text.split())[:200]


# Progress


class ProgressBar:
    """A progress bar with the interface that pooch needs, drawn by rich."""

    def __init__(self, progress: Progress, title: str) -> None:
        self.progress = progress
        self.task = progress.add_task(title, total=None)

    @property
    def total(self) -> float | None:
        return self.progress.tasks[self.task].total

    @total.setter
    def total(self, size: int) -> None:
        self.progress.update(self.task, total=size or None)

    def update(self, size: int) -> None:
        self.progress.advance(self.task, size)

    def reset(self) -> None:
        self.progress.reset(self.task)


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[ProgressBar | bool]:
    """Show a progress bar if standard error is a terminal; otherwise yield False, which tells pooch to show none."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield False
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield ProgressBar(progress, title)
