"""The files that a page has within itself: its own scripts and style, and the library Bokeh, which is never imported."""

import base64
import hashlib
import importlib.util
from functools import cache
from pathlib import Path

STATIC = Path(__file__).with_name("static")
LIBRARY = ("bokeh.min.js", "bokeh-api.min.js")
SCRIPTS = (
    "theme.js",
    "state.js",
    "board.js",
    "matrix.js",
    "charts.js",
    "panels.js",
    "live.js",
    "main.js",
)  # in the order in which they run
PLAIN_SCRIPTS = ("theme.js", "plain.js")  # of pages without charts
MISSING = "Charts that can be pointed at need the package bokeh, which is not installed: pip install bokeh"


@cache
def library() -> tuple[str, ...]:
    """Return the scripts of Bokeh; empty if it is not installed. Reading them is all: Python imports nothing of it."""
    found = importlib.util.find_spec("bokeh")
    for place in (found and found.submodule_search_locations) or ():
        folder = Path(place) / "server" / "static" / "js"
        if all((folder / name).is_file() for name in LIBRARY):
            return tuple((folder / name).read_text(encoding="utf-8") for name in LIBRARY)
    return ()


@cache
def style() -> str:
    """Return the style of the page."""
    return (STATIC / "page.css").read_text(encoding="utf-8")


@cache
def scripts(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return scripts of the page's own."""
    return tuple((STATIC / name).read_text(encoding="utf-8") for name in names)


def policy(inlined: tuple[str, ...], live: bool) -> str:
    """Return the content security policy of a page: it loads nothing, and runs only the scripts that were put into it.

    Args:
        inlined: the scripts, as they stand between their tags.
        live: whether the page asks the server that it came from for news.
    """
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inlined]
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
    connect = "; connect-src 'self'" if live else ""
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:{connect}"
