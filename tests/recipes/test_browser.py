"""The page of a recipe in a real browser: light, dark, on a phone, on paper, without script."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hatrack.recipes.page import write_page
from hatrack.recipes.plots import accuracy_lines
from hatrack.recipes.results import Records, index
from hatrack.reporting.looks import look
from tests.helpers.browser import Look, axe_violations, browser
from tests.helpers.records import ACCURACY, make
from tests.recipes.toys import PART, RECIPE

pytestmark = [pytest.mark.browser, pytest.mark.filterwarnings("default")]
__all__ = ["browser"]
STROKES = "[...document.querySelectorAll('figure svg path')].map(p => getComputedStyle(p).stroke)"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = replace(RECIPE, parts=(replace(PART, plots=(accuracy_lines(),)),))
    return write_page(recipe, index(make(method, seed) for method, seed in ACCURACY), tmp_path_factory.mktemp("recipe"))


def rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[k : k + 2], 16)) for k in (1, 3, 5))})"


def ground(found: Look) -> str:
    return str(found.page.evaluate("getComputedStyle(document.body).backgroundColor"))


def test_lines_of_a_method_follow_the_theme(browser: Any, page: Path) -> None:
    with Look(browser, page, color_scheme="dark") as found:
        assert rgb(look("hat").dark) in found.page.evaluate(STROKES)
        dark = ground(found)
        found.page.locator("#theme").click()
        assert ground(found) == "rgb(255, 255, 255)" != dark
        assert rgb(look("hat").colour) in found.page.evaluate(STROKES)
        assert rgb(look("hat").dark) not in found.page.evaluate(STROKES)
        assert not found.errors
        assert found.requests == [page.as_uri()], "one file"


def test_paper_is_white_and_a_phone_scrolls_tables_only(browser: Any, page: Path) -> None:
    with Look(browser, page, color_scheme="dark", viewport={"width": 390, "height": 800}) as found:
        assert found.page.evaluate("document.documentElement.scrollWidth") == 390
        found.page.emulate_media(media="print")
        assert ground(found) == "rgb(255, 255, 255)"
        assert rgb(look("hat").colour) in found.page.evaluate(STROKES)
        assert found.page.locator("#theme").is_hidden()


@pytest.mark.parametrize("shift", [0.0, 0.25, 0.5, 0.75])  # of a pixel: at some of them lines were missing
def test_the_line_between_two_rows_goes_through_all_of_its_cells(browser: Any, tmp_path: Path, shift: float) -> None:
    """The first column stays where it is when a table is scrolled, and used to cover some of the lines."""
    rows = tuple(replace(PART.rows[0], label=f"HAT {k}") for k in range(12))
    path = write_page(replace(RECIPE, parts=(replace(PART, rows=rows, claims=()),)), Records(), tmp_path)
    with Look(browser, path, viewport={"width": 700, "height": 2000}) as found:  # so narrow that the table is scrolled
        found.page.add_style_tag(content=f"main {{ padding-top: {shift}px }}")
        picture = Image.open(io.BytesIO(found.page.screenshot())).convert("L")
        boxes = [row.bounding_box() for row in found.page.locator(".recipe tbody tr").all()]
        cells = [cell.bounding_box() for cell in found.page.locator(".recipe tbody tr:first-child > *").all()]
    assert len(boxes) == 12
    for box in boxes[:-1]:
        bottom = round(box["y"] + box["height"])
        for cell in cells[:2]:
            x = round(cell["x"] + cell["width"]) - 3
            assert min(picture.getpixel((x, y)) for y in range(bottom - 2, bottom + 2)) < 250, "no line"


def test_without_script_the_theme_is_the_systems(browser: Any, page: Path) -> None:
    with Look(browser, page, color_scheme="dark", java_script_enabled=False) as found:
        assert found.page.locator("#theme").count() == 0
        assert found.page.locator("table.recipe").first.is_visible()
        picture = found.page.screenshot(clip={"x": 0, "y": 0, "width": 20, "height": 20})
    with Look(browser, page, color_scheme="light", java_script_enabled=False) as found:
        assert found.page.screenshot(clip={"x": 0, "y": 0, "width": 20, "height": 20}) != picture


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_violation(browser: Any, page: Path, scheme: str) -> None:
    with Look(browser, page, color_scheme=scheme) as found:
        assert axe_violations(found) == []
