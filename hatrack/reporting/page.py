"""The page of a report: one HTML file that loads no other file, is read without script and alive with it."""

import json
from typing import Any

from markupsafe import Markup

from hatrack.reporting.assets import MISSING, SCRIPTS, library, policy, scripts, style
from hatrack.reporting.collect import ReportData, collect
from hatrack.reporting.looks import look
from hatrack.reporting.templating import templates

__all__ = ["ReportData", "collect", "page_json", "render_page"]
PIECES = 2000
LIVE = "window.HATRACK_LIVE = true;"


def render_page(data: ReportData, *, live: bool = False) -> str:
    """Return the page as text.

    Args:
        data: what `collect` returned.
        live: whether a server gives the page and `data.json` (`page_json`), so that the page renews itself.
    """
    data = {**data, "running": _with_looks(data["running"])}
    first, *own = scripts(SCRIPTS)
    inlined = (*library(), *([LIVE] if live else []), *own)
    values = {
        "data": data,
        "live": live,
        "policy": policy((first, *inlined), live),
        "style": Markup(style()),
        "first": Markup(first),
        "inlined": [Markup(text) for text in inlined],
        "island": Markup(island(_charts(data))),
        "without_library": "" if library() else MISSING,
    }
    pieces = templates().get_template("report.html").stream(values)
    pieces.enable_buffering(PIECES)  # a page of many records has a million pieces
    return "".join(pieces)


def page_json(data: ReportData) -> str:
    """Return what a page asks for while it is shown: runs that go on, and a digest that tells when to load it again."""
    running = _with_looks(data["running"])
    html = templates().get_template("running.html").render(data={"running": running})
    return json.dumps({"digest": data["digest"], "running": running, "running_html": html}, default=str)


def _with_looks(running: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return runs that go on with the looks of their methods, as in all charts."""
    return [{**run, "look": look(run["method"])._asdict() if run["method"] else None} for run in running]


def island(value: Any) -> str:
    """Return a value as JSON that can stand in a page: no name in it can end the element or begin a tag or a comment."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _charts(data: ReportData) -> dict[str, Any]:
    return {
        "digest": data["digest"],
        "settings": [{"id": section["id"], **section["chart"]} for section in data["sections"]],
        "sweeps": data["sweeps"],
        "running": data["running"],
    }
