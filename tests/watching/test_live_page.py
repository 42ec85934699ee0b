"""The live page in a real browser: curves that grow, capacity that fills, a kill and a resumption, a record that arrives."""

import threading
import time

import pytest

from hatrack.cli.watching import make_server
from hatrack.reporting.looks import look as method_look
from tests.helpers.browser import Look, browser
from tests.helpers.lines import about, epoch, learned, write
from tests.helpers.records import make, save

pytestmark = pytest.mark.browser
__all__ = ["browser"]
POINTS = (
    "Bokeh.documents.flatMap(d => d.roots()).flatMap(f => (f.renderers || []).map(r => r.data_source.data.x?.length || 0))"
)


@pytest.fixture
def served(tmp_path):
    """The address of a server of a folder with two records and a run that goes on."""
    save(tmp_path, [make("sgd", 0), make("hat", 0)])
    write(tmp_path, "run", about(layers={"2": "linear 1, 50 units"}), *(epoch(0, k, 0.5 + 0.04 * k) for k in range(4)))
    server = make_server(tmp_path, 0)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server.address
    server.shutdown()
    server.server_close()


def wait_until(look, expression):
    """Until an expression is true in the page, whose policy forbids Playwright's own way of waiting."""
    until = time.monotonic() + 60
    while not look.page.evaluate(expression):
        assert time.monotonic() < until, (expression, look.page.inner_text("#running"))
        time.sleep(0.1)


def text_has(*parts):
    """An expression that is true when the part of the page about runs has these texts."""
    return " && ".join(f"document.getElementById('running').innerText.includes({part!r})" for part in parts)


def test_two_browsers_see_a_run_go_on_and_end(browser, served, tmp_path):
    looks = [Look(browser, served), Look(browser, served, viewport={"width": 390, "height": 800})]
    for look in looks:
        wait_until(look, text_has("epoch 4", "running"))
        assert "linear 1, 50 units" not in look.page.inner_text("#running")
    write(tmp_path, "run", *(epoch(0, k, 0.5 + 0.04 * k) for k in range(4, 10)), *learned(0, [0.9, 0.1, 0.1], **{"2": 0.25}))
    for look in looks:
        wait_until(look, text_has("epoch 10", "linear 1, 50 units", "90.0 %"))
        assert look.page.locator("#running meter").first.get_attribute("value") == "0.25"
    write(tmp_path, "run", epoch(1, 0), *learned(1, [0.85, 0.9, 0.1], **{"2": 0.75}))
    for look in looks:
        wait_until(look, "document.querySelector('#running meter')?.value === 0.75")
    before = [look.page.inner_text("header.top") for look in looks]
    save(tmp_path, [make("joint", 0)])
    for look, old in zip(looks, before, strict=True):
        wait_until(look, "document.querySelector('header.top').innerText.includes('3 records')")
        assert "2 records" in old
        assert look.errors == []
        assert {address.split("/")[2] for address in look.requests if "://" in address} == {served.split("/")[2]}


def test_a_curve_goes_on_after_a_kill(browser, served, tmp_path):
    look = Look(browser, served)
    wait_until(look, text_has("epoch 4"))
    wait_until(look, f"Math.max(0, ...{POINTS}) >= 4")
    write(tmp_path, "run", about(pid=2**22 + 5))  # of a process that is gone
    wait_until(look, text_has("stopped"))
    write(tmp_path, "run", about(), *(epoch(0, k, 0.5 + 0.04 * k) for k in range(2, 8)))  # from an earlier epoch
    wait_until(look, text_has("running", "epoch 8"))
    assert look.page.evaluate(
        "fetch('data.json').then(r => r.json()).then(news => news.running[0].curve.map(p => p[1]))"
    ) == list(range(1, 9))
    assert look.errors == []


def test_a_curve_breaks_between_tasks_and_has_the_colour_of_its_method(browser, served, tmp_path):
    write(tmp_path, "run", *(epoch(1, k, 0.4) for k in range(3)))
    look = Look(browser, served)
    wait_until(look, "!!document.querySelector('[data-running]')?.dataset.drawn")
    chart = "Bokeh.documents.flatMap(d => d.roots()).find(f => f.renderers)"
    line = f"{chart}.renderers[0]"
    assert look.page.evaluate(f"[...{line}.data_source.data.x]") == [1, 2, 3, 4, 4.5, 5, 6, 7]
    assert look.page.evaluate(f"[...{line}.data_source.data.y].map(Number.isNaN)") == [*[False] * 4, True, *[False] * 3]
    assert look.page.evaluate(f"{chart}.center.filter(one => one.type === 'Span').map(one => one.location)") == [4.5]
    assert look.page.evaluate(f"{line}.glyph.line_color.value") == method_look("hat").colour
    assert look.errors == []
