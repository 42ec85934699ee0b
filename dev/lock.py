"""Writes requirements.lock: the versions of constraints.txt with the sha256 of their files, for pip's --require-hashes.

    python -m dev.lock            # read the index and write requirements.lock; needs the network
    python -m dev.lock --check    # compare requirements.lock with constraints.txt; needs no network

The sha256 are those of the public package index: all source archives, and the wheels of all platforms for the versions of
Python that hatrack supports. UNLISTED has the packages that are left out, with the reasons.
"""

import argparse
import re
import sys
import urllib.request
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

ROOT = Path(__file__).parent.parent
INDEX = "https://pypi.org/simple/"
OLDEST = (3, 11)  # as requires-python in pyproject.toml
UNLISTED = {
    "torch": "the build without GPU libraries comes from another index, with other files and other hashes",
}
HEAD = """\
# The versions of constraints.txt with the sha256 of their files on PyPI; written by `python -m dev.lock`. Not listed:
{unlisted}
"""


class Published(NamedTuple):
    """One file of the index."""

    name: str
    sha256: str


class _Links(HTMLParser):
    """Collects the files of a page of the index, without those that were withdrawn."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[Published] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        found = re.search(r"([^/#]+)#sha256=([0-9a-f]{64})$", given.get("href") or "")
        if tag == "a" and found and "data-yanked" not in given:
            self.files.append(Published(unquote(found[1]), found[2]))


def published(page: str) -> list[Published]:
    """Return the files that a page of the index lists with their sha256."""
    links = _Links()
    links.feed(page)
    return links.files


def pinned(text: str) -> dict[str, str]:
    """Return the versions in a file of constraints or requirements, by canonical name."""
    return {canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)==([^\s\\;]+)", text, re.MULTILINE)}


def fits(name: str, version: str) -> bool:
    """Return whether a file is of this version, and of a Python that hatrack supports."""
    try:
        if name.endswith(".whl"):
            _, found, _, tags = parse_wheel_filename(name)
            return found == Version(version) and any(_is_supported(tag.interpreter, tag.abi) for tag in tags)
        return parse_sdist_filename(name)[1] == Version(version)
    except (InvalidWheelFilename, InvalidSdistFilename):  # old kinds of files
        return False


def _is_supported(interpreter: str, abi: str) -> bool:
    """Return whether a wheel's tags allow CPython from the oldest version on."""
    found = re.fullmatch(r"cp3(\d+)", interpreter)
    return interpreter.startswith("py3") or bool(found and (abi == "abi3" or int(found[1]) >= OLDEST[1]))


def entry(name: str, version: str, files: Iterable[Published]) -> str:
    """Return the lines of one package.

    Raises:
        ValueError: the index has no file of this version.
    """
    hashes = sorted({file.sha256 for file in files if fits(file.name, version)})
    if not hashes:
        raise ValueError(f"{name}=={version}: the index lists no file of this version with a sha256")
    return f"{name}=={version}" + "".join(f" \\\n    --hash=sha256:{one}" for one in hashes)


def lock(index: str, versions: dict[str, str]) -> str:
    """Read the index and return the text of requirements.lock."""
    entries = []
    for name, version in versions.items():
        if name not in UNLISTED:
            request = urllib.request.Request(f"{index}{name}/", headers={"Accept": "text/html"})
            with urllib.request.urlopen(request, timeout=60) as page:
                entries.append(entry(name, version, published(page.read().decode())))
    unlisted = "\n".join(f"# {name}: {reason}" for name, reason in UNLISTED.items())
    return HEAD.format(unlisted=unlisted) + "\n".join(entries) + "\n"


def differences(locked: str, versions: dict[str, str]) -> Iterator[str]:
    """Yield a line for every package whose entry in requirements.lock is not what constraints.txt asks for."""
    there = pinned(locked)
    hashed = set(re.findall(r"^([\w.-]+)==\S+ \\\n +--hash=sha256:[0-9a-f]{64}", locked, re.MULTILINE))
    for name in sorted(versions.keys() | there.keys()):
        wanted = None if name in UNLISTED else versions.get(name)
        if there.get(name) != wanted:
            yield f"{name}: requirements.lock has {there.get(name)}, constraints.txt {wanted}"
        elif wanted and name not in hashed:
            yield f"{name}: requirements.lock has no sha256"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="only compare requirements.lock with constraints.txt")
    parser.add_argument("--index", default=INDEX, help="another index with the same files")
    given = parser.parse_args()
    file, versions = ROOT / "requirements.lock", pinned((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    if given.check:
        wrong = list(differences(file.read_text(encoding="utf-8"), versions))
        print("\n".join([*wrong, "write it again: python -m dev.lock"] if wrong else ["requirements.lock is up to date"]))
        return 1 if wrong else 0
    file.write_text(lock(given.index, versions), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
