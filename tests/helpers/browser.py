"""A real browser for tests: Chromium of the system, driven by Playwright. What is missing is named, never skipped."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
AXE = Path(__file__).resolve().parents[2] / "build" / "axe" / "node_modules" / "axe-core" / "axe.min.js"


def chromium() -> str:
    """Return the path of Chromium, or fail with what to install."""
    found = os.environ.get("HATRACK_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if not found:
        pytest.fail("chromium is missing: apt-get install chromium, or set HATRACK_CHROMIUM to its path", pytrace=False)
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser with a new, empty profile."""
    path = chromium()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.fail("playwright is missing: pip install playwright", pytrace=False)
    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield running
        running.close()


class Look:
    """A page that is open, and what went wrong on it.

    Args:
        browser: the fixture.
        address: a file, or the address of a server.
        options: of the context of Playwright, such as `color_scheme`.
    """

    def __init__(self, browser: Any, address: Path | str, hash: str = "", **options: Any) -> None:
        settings = {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light", **options}
        self.context = browser.new_context(**settings)
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        self.page.on("dialog", lambda dialog: (self.errors.append(f"dialog {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto((address.as_uri() if isinstance(address, Path) else address) + hash)

    def __enter__(self) -> "Look":
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def ready(self) -> "Look":
        """Wait until the scripts of the page have run and the first chart is drawn."""
        self.page.wait_for_function("() => !!document.documentElement.dataset.ready", timeout=30_000)
        self.page.evaluate("H.drawOne(document.querySelector('.scatter figure').job)")  # it may be below the screen
        self.page.wait_for_function("() => !!document.querySelector('.scatter .plot')?.dataset.drawn", timeout=30_000)
        return self

    def order(self, table: str = ".board") -> list[str]:
        """Return the labels of the rows of the leaderboard that are shown, in their order."""
        return self.page.eval_on_selector_all(  # type: ignore[no-any-return]
            f"{table} tr.entry:not([hidden])", "rows => rows.map(r => r.dataset.label)"
        )

    def chart(self, kind: str) -> Any:
        """Bring a chart to the screen, wait until it is drawn, and return its plot."""
        figure = self.page.locator(f"figure[data-chart='{kind}']").first
        figure.scroll_into_view_if_needed()
        plot = figure.locator(".plot").first
        drawn = "p => !!p.dataset.drawn && !!p.view"
        self.page.wait_for_function(drawn, arg=plot.element_handle(), timeout=30_000)
        return plot

    def point(self, chart: str, x: float, y: float) -> tuple[float, float]:
        """Return where on the screen a point of a chart is."""
        plot = self.chart(chart)
        plot.scroll_into_view_if_needed()
        self.page.wait_for_timeout(300)
        place = """(p, [x, y]) => { const v = p.view, box = v.el.getBoundingClientRect();
            return [box.left + v.frame.x_scale.compute(x), box.top + v.frame.y_scale.compute(y)]; }"""
        left, top = plot.evaluate(place, [x, y])
        return left, top


def axe_violations(look: Look) -> list[tuple[str, list[str]]]:
    """Return the serious and critical violations that axe finds on a page, with the elements that have them."""
    if not AXE.is_file():
        pytest.fail("axe-core is missing: make test-browser installs it with npm", pytrace=False)
    look.page.evaluate(AXE.read_text(encoding="utf-8"))
    found = look.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    assert len(found["passes"]) > 10, "it looked"
    bad = [one for one in found["violations"] if one["impact"] in ("serious", "critical")]
    return [(one["id"], [node["html"][:120] for node in one["nodes"][:3]]) for one in bad]
