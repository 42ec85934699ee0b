"""The page of a recipe: what it says, as HTML, Markdown and CSV."""

import csv
import io

import pytest

from hatrack.recipes.page import csv_text, main_table, write_page
from hatrack.recipes.recipe import Recipe
from hatrack.recipes.results import Records, Results, index
from tests.helpers.records import ACCURACY, make
from tests.recipes.toys import PART, RECIPE


@pytest.fixture
def records():
    return index(make(method, seed) for method, seed in ACCURACY)


def test_main_table(records):
    table = main_table(Results(PART, records))
    assert len(table.head) == 2 + 4 + 4
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["HAT"][:5] == ["2", "80.0 ± 1.0", "79.0 ± 1.4", "−1.0", "agrees"]  # noqa: RUF001  (80 and 78 %)
    assert rows["SGD"][3:5] == ["8.8", "higher"]  # 65 and 72.5 %: 2 sqrt(3.75^2 + 1) = 7.8
    assert rows["EWC"][0] == "0"
    assert rows["EWC"][-1] == "not run yet"


def test_page_in_all_formats(records, tmp_path):
    page = write_page(RECIPE, records, tmp_path, notice="Only a trial.")
    html, markdown = page.read_text(), (tmp_path / "toy.md").read_text()
    assert "Two tasks &amp; three &lt;methods&gt;." in html
    assert "Two tasks & three <methods>." in markdown
    for text in (html, markdown):
        assert "Only a trial." in text
        assert "79.0 ± 1.4" in text
        assert "It is plain." in text
        assert "does not hold" in text
        assert "not known yet" in text
    assert "hatrack run digits-and-clothes hat --seeds 0-1" in html
    assert "| HAT | 2 | 80.0 ± 1.0 |" in markdown
    assert "<script" not in html


def test_a_page_without_any_record(tmp_path):
    page = write_page(RECIPE, Records(), tmp_path)
    assert "not run yet" in page.read_text()


def test_the_same_records_give_the_same_bytes(records, tmp_path):
    first = write_page(RECIPE, records, tmp_path / "a").read_bytes()
    assert write_page(RECIPE, records, tmp_path / "b").read_bytes() == first


def test_csv_has_every_number_with_all_digits(records):
    recipe: Recipe = RECIPE
    lines = list(csv.DictReader(io.StringIO(csv_text(recipe, records))))
    hat = {(line["quantity"], line["tasks"]): line for line in lines if line["approach"] == "HAT"}
    assert float(hat["accuracy", ""]["mean"]) == pytest.approx(0.79)
    assert float(hat["accuracy", ""]["published"]) == 0.8
    assert float(hat["ratio", "1"]["mean"]) == pytest.approx((0 + (0.45 / 0.5 - 1)) / 2)
    assert {"ratio"} == {key for key, tasks in hat if tasks}
