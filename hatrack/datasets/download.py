"""Downloads: a set's published files, each checked by its checksum, then decoded into the data folder."""

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
from hatrack.datasets.archives import decode
from hatrack.datasets.catalog import SETS, File
from hatrack.options import choose

ATTEMPTS = 3  # rounds over all addresses of a file
PAUSE = 1.0  # seconds before the second round, twice that before the third
TIMEOUT = 30.0  # seconds in which a server must say something


def get(name: str, mirror: str = "", keep: bool = False) -> cache.Note | None:
    """Download a set into the data folder; None if it is already there. `keep`: keep the archives as well.

    Finished files stay until the set is complete, so a second try goes on where the first one stopped.
    """
    choose("data set", name, SETS)
    if not SETS[name].files:
        raise ValueError(
            f"{name} can't be downloaded freely: ask for it at {SETS[name].home}, put the images of each of its "
            f"{SETS[name].classes} classes in a sub-folder, and hatrack data import FOLDER --name {name} takes them"
        )
    with cache.locked(name):
        if present(name):
            return None
        archives = cache.folder() / "downloads" / name
        with cache.room(name):
            download(name, archives, mirror or os.environ.get("HATRACK_MIRROR", ""))
        note = unpack(name, archives)
        if not keep:
            shutil.rmtree(archives, ignore_errors=True)
            with contextlib.suppress(OSError):
                archives.parent.rmdir()  # if no other set has its files there
        return note


def present(name: str) -> bool:
    """Whether the set is there and good; one that is broken is fetched anew."""
    if not cache.place(name).is_file():
        return False
    try:
        cache.verified(name)
    except ValueError as error:
        print(f"{error}: fetching it anew", file=sys.stderr)
        return False
    return True


def unpack(name: str, archives: Path) -> cache.Note:
    """Decode the files and keep what comes out, if it is the whole set."""
    spec, arrays = SETS[name], decode(name, archives)
    counts = (len(arrays["y_train"]), len(arrays["y_test"]))
    if counts != (spec.train, spec.test):
        wanted = f"{spec.train:,} + {spec.test:,}"
        raise ValueError(
            f"the files of {name} hold {counts[0]:,} + {counts[1]:,} images instead of {wanted}; nothing was kept"
        )
    if spec.digest and cache.digest(arrays) != spec.digest:
        raise ValueError(f"the files of {name} do not hold the published images; nothing was kept")
    return cache.keep(name, arrays, "downloaded")


# Files


def download(name: str, folder: Path, mirror: str = "") -> None:
    """Every file of a set, those that are already there excepted."""
    if mirror and not mirror.startswith(("http://", "https://")):
        raise ValueError(f"a mirror is an address such as https://example.org/data, not {mirror!r}")
    folder.mkdir(parents=True, exist_ok=True)
    for stray in folder.glob("tmp*"):  # of a download that was killed
        stray.unlink(missing_ok=True)
    for file in SETS[name].files:
        addresses = [(mirror.rstrip("/") + "/" if mirror else base) + file.name for base in file.bases]
        with bar(f"{name}: {file.name}") as progress:
            fetch(file, list(dict.fromkeys(addresses)), folder, progress)


def fetch(file: File, addresses: list[str], folder: Path, progress: Any = False) -> None:
    """One file, from the first address that has it, in several rounds: servers have bad moments."""
    pooch, requests = tools()
    loader = pooch.HTTPDownloader(progressbar=progress, chunk_size=1 << 16, timeout=TIMEOUT)
    for attempt in range(ATTEMPTS):
        time.sleep(PAUSE * attempt)
        reasons, final = [], True
        for address in addresses:
            try:
                pooch.retrieve(address, f"md5:{file.md5}", fname=file.name, path=folder, downloader=loader)
                return
            except requests.RequestException as error:
                reasons.append(f"{address}: {reason(error)}")
                status = getattr(error.response, "status_code", 0)
                final = final and 400 <= status < 500  # it is not there; asking again does not help
            except ValueError:
                reasons.append(f"{address}: what came is not the published file (its md5 is not {file.md5})")
                final = False
        if final:
            break
    raise OSError(f"could not download {file.name}: {'; '.join(reasons)}. --mirror URL names another address")


def tools() -> tuple[Any, Any]:
    """Imported only here, so that all but downloads works without them."""
    try:
        import pooch  # type: ignore[import-untyped]
        import requests
    except ImportError:
        raise OSError("downloads need the package pooch: pip install pooch; or hatrack data import FOLDER") from None
    pooch.get_logger().setLevel("ERROR")
    return pooch, requests


def reason(error: Exception) -> str:
    """The innermost cause of a failed request, in few words."""
    response = getattr(error, "response", None)
    if response is not None:
        return f"{response.status_code} {response.reason}"
    text = str(error)
    for words, said in (
        ("IncompleteRead", "the connection broke off half-way"),
        ("timed out", "no answer in time"),
        ("Failed to resolve", "no such host, or no network"),
        ("NameResolutionError", "no such host, or no network"),
        ("refused", "connection refused"),
        ("Connection aborted", "the connection broke off half-way"),
    ):
        if words in text:
            return said
    return " ".join(text.split())[:200]


# Progress


class Bar:
    """What pooch asks of a progress bar, drawn by rich."""

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

    def close(self) -> None:
        pass


@contextlib.contextmanager
def bar(title: str) -> Iterator[Bar | bool]:
    """On a terminal only."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield False
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield Bar(progress, title)
