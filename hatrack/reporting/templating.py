"""Jinja's templates of all pages, and what a page without charts puts into them."""

import re
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape

from hatrack.reporting.assets import PLAIN_SCRIPTS, policy, scripts, style
from hatrack.text import duration

TEMPLATES = Path(__file__).with_name("templates")


@cache
def templates(*folders: Path) -> Environment:
    """Return the templates of the report and those in further folders; what they put into HTML is escaped."""
    environment = Environment(
        loader=FileSystemLoader([*folders, TEMPLATES]),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["duration"] = duration
    environment.filters["prose"] = prose
    return environment


def prose(text: str) -> Markup:
    """Return a text of a Markdown page for HTML: code as code, links, which lead to pages that are not here, as texts."""
    found = re.sub(r"\[([^\]]+)\]\([^)\s]+\)", r"\1", str(escape(text)))
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", found))


def plain_page(name: str, *folders: Path, **values: Any) -> str:
    """Return a page without charts: the look of a report, and its button for light and dark.

    Args:
        name: of the template, which extends base.html.
        folders: where it is, if not here.
        values: what it shows.
    """
    first, *rest = scripts(PLAIN_SCRIPTS)
    base = {
        "policy": policy((first, *rest), live=False),
        "style": Markup(style()),
        "first": Markup(first),
        "inlined": [Markup(text) for text in rest],
    }
    return templates(*folders).get_template(name).render(base, **values)
