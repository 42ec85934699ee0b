"""The page of a recipe: what it says, as HTML, Markdown and CSV."""

import csv
import io
import re
from dataclasses import replace

import numpy as np
import pytest

from hatrack.recipes import RECIPES
from hatrack.recipes.page import csv_text, head_groups, main_table, page_texts, write_page
from hatrack.recipes.plots import fullest, ratio_lines, row_looks, sweep
from hatrack.recipes.quantities import Quantity, summary
from hatrack.recipes.recipe import Recipe, above
from hatrack.recipes.results import Records, Results, index
from hatrack.reporting.looks import look
from tests.helpers.records import ACCURACY, make, with_spec
from tests.recipes.toys import PART, RECIPE

ACCURACY_OF = summary("accuracy")


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
        assert "too few seeds to test (n = 2)" in text
    assert "hatrack run digits-and-clothes hat --seeds 0-1" in html
    assert "| HAT | 2 | 80.0 ± 1.0 |" in markdown
    assert "rows which are not run yet: HAT is better than EWC." in markdown
    assert "| HAT is better than EWC. |" not in markdown
    assert set(re.findall(r"(?:src|href)=\"([^\"#]*)", html)) == {"data:,", ""}, "it loads nothing"


def test_texts_without_figures_are_those_of_the_page(records, tmp_path):
    recipe = replace(RECIPE, parts=(replace(PART, plots=(ratio_lines(),)),))
    write_page(recipe, records, tmp_path)
    texts = page_texts(recipe, records)
    assert texts == {path.name: path.read_text() for path in tmp_path.iterdir() if path.suffix in (".md", ".csv")}
    assert "figures/toy-" in texts["toy.md"]


def test_the_markdown_page_links_to_the_paper(records):
    recipe = replace(RECIPE, paper="Somebody 2020, https://example.org/1.2")
    assert "Paper: Somebody 2020, <https://example.org/1.2>. In" in page_texts(recipe, records)["toy.md"]


def test_the_page_counts_what_it_shows(records, tmp_path):
    text = re.sub(r"<[^>]+>", " ", write_page(RECIPE, records, tmp_path).read_text())
    assert re.search(r"Rows with all their records\s+4 of 5", text)
    assert re.search(
        r"Claims of the paper that hold\s+1 of 2\s+By the means.*Waiting for rows that are not run yet: 1", text
    )


def test_the_page_tells_what_holds_by_the_means_from_what_seeds_support(tmp_path):
    """Of two claims that hold, HAT is ahead of SGD at every seed, and of EWC at two of three."""
    values = {"hat": (0.80, 0.82, 0.84), "sgd": (0.70, 0.70, 0.70), "ewc": (0.79, 0.83, 0.81)}
    found = index(
        with_spec(make(method, 0, [[value, value], [value, value]]), seed=seed)
        for method, group in values.items()
        for seed, value in enumerate(group)
    )
    claims = tuple(above(f"over {other}", summary("accuracy"), "HAT", other) for other in ("SGD", "EWC"))
    recipe = replace(RECIPE, parts=(replace(PART, claims=claims),))
    html, markdown = write_page(recipe, found, tmp_path).read_text(), (tmp_path / "toy.md").read_text()
    assert "| over SGD | **holds**, and seeds support this | p = 0.009 (n = 3) |" in markdown
    assert "| over EWC | holds by the means, but it may be chance | p = 0.48 (n = 3) |" in markdown
    text = re.sub(r"<[^>]+>", "", html)
    assert "holds, and seeds support this: p = 0.009" in text
    assert "holds by the means, but it may be chance: p = 0.48" in text
    assert re.search(r"hold\s*2 of 2\s*By the means. Seeds support 1 of those that hold, and 0 of those that do not", text)


def test_texts_of_the_markdown_page_are_no_markup_on_the_html_page(records, tmp_path):
    part = replace(PART, text="`joint` is <once>, see [scenarios](../scenarios.md).")
    html = write_page(replace(RECIPE, parts=(part,)), records, tmp_path).read_text()
    assert "<p><code>joint</code> is &lt;once&gt;, see scenarios.</p>" in html
    assert "`joint` is <once>, see [scenarios](../scenarios.md)." in (tmp_path / "toy.md").read_text()


def test_rows_and_figures_have_the_looks_of_their_methods(records, tmp_path):
    part = replace(PART, plots=(ratio_lines(),))
    results = Results(part, records)
    (axes,) = part.plots[0].draw(results).axes
    drawn = {(line.get_color(), line.get_marker()) for line in axes.get_lines()}
    assert drawn == {(look(name).colour, "o") for name in ("hat", "sgd")}
    html = write_page(replace(RECIPE, parts=(part,)), records, tmp_path).read_text()
    assert f"--c:{look('ewc').colour};--d:{look('ewc').dark}" in html
    assert f"light-dark({look('hat').colour}, {look('hat').dark})" in html


def test_a_sweep_has_the_looks_of_the_methods_that_are_swept(records):
    rows = [replace(row, label=f"{row.label}, {x}", x=x) for row in PART.rows[:2] for x in (1, 2)]
    part = replace(PART, rows=tuple(rows), plots=(sweep("sweep", "title", "x", ACCURACY_OF, ("HAT", "SGD")),))
    (axes,) = part.plots[0].draw(Results(part, records)).axes
    drawn = [container.lines[0].get_color() for container in axes.containers]
    assert drawn == [look("hat").colour, look("sgd").colour]


def test_several_rows_of_a_method_are_told_apart():
    found = row_looks(replace(PART, rows=(*PART.rows, replace(PART.rows[0], label="HAT, again"))))
    assert found["HAT"] == look("hat")
    assert found["HAT, again"] == look("hat", 1)


def test_methods_of_one_hue_have_other_dashes():
    (part,) = RECIPES["regimes"].only(("cifar100",))
    looks = row_looks(part)
    for pair in (("naive SGD", "stable SGD"), ("A-GEM", "ER")):
        first, second = (looks[label] for label in pair)
        assert first.colour == second.colour
        assert first.dash != second.dash


def test_every_point_of_a_line_is_a_mean_over_the_same_seeds():
    full, short = np.array([-0.1, -0.2]), np.array([np.nan, -0.8])
    (line,) = fullest([full, short, short])
    assert line is full  # not a jump to -0.6 at the last point
    assert len(fullest([full, full])) == 2
    assert len(fullest([short, short])) == 2


def test_a_sweep_has_a_tick_at_every_value_and_a_ratio_is_seen_from_0(records):
    """Two rows at 1 and 2, two at 2 and 4. A small difference does not fill an axis of ratios, as it does others."""
    swept = zip(PART.rows[:2], ((1, 2), (2, 4)), strict=True)
    part = replace(PART, rows=tuple(replace(row, label=f"{row.label}, {x}", x=x) for row, xs in swept for x in xs))
    for unit in ("ratio", ""):
        quantity = Quantity(ACCURACY_OF.measure._replace(unit=unit), lambda record, _: -0.1 - 0.01 * record.spec.seed)
        (axes,) = sweep("sweep", "title", "x", quantity, ("HAT", "SGD")).draw(Results(part, records)).axes
        assert list(axes.get_xticks()) == [1, 2, 4]
        assert (axes.get_ylim()[1] == 0) == (unit == "ratio")


def test_a_sweep_keeps_names_and_bars_apart(records):
    rows = [replace(row, label=f"{row.label}, {x}", x=x) for row in PART.rows[:2] for x in (1, 2)]
    quantity = summary("forgetting_mirzadeh")
    part = replace(PART, rows=tuple(rows))
    (axes,) = sweep("sweep", "title", "x", quantity, ("HAT", "SGD")).draw(Results(part, records)).axes
    assert axes.get_title("left") == "forgetting (Mirzadeh et al. 2020)"
    first, second = (container.lines[0].get_xdata() for container in axes.containers)
    assert not set(first) & set(second)
    assert list(axes.get_xticks()) == [1, 2]
    some = {key: group for key, group in records.items() if '"method": "hat"' in key}
    (axes,) = sweep("sweep", "title", "x", summary("accuracy"), ("HAT", "SGD")).draw(Results(part, Records(some))).axes
    (alone,) = axes.containers
    assert list(alone.lines[0].get_xdata()) == [1, 2], "at its place where the other line is missing"
    assert sweep("sweep", "title", "x", summary("accuracy"), ("SGD",)).draw(Results(part, Records(some))) is None


def test_columns_of_a_quantity_have_one_head():
    heads = ["approach", "n", "Accuracy, %: published", "ours", "difference", "verdict", "Forgetting"]
    groups = [("", ["approach"]), ("", ["n"]), ("Accuracy, %", ["published", "ours", "difference", "verdict"])]
    assert head_groups(heads) == [*groups, ("", ["Forgetting"])]


def test_where_only_the_order_counts_there_are_no_differences(records):
    part = replace(PART, order_by=summary("accuracy"))
    head = main_table(Results(part, records)).head
    of_quantities = [columns for title, columns in head_groups(head) if title]
    assert of_quantities == [["published", "ours", "verdict"]] * len(of_quantities) != []
    assert {len(row) for row in main_table(Results(part, records)).rows} == {len(head)}


def test_what_old_records_do_not_tell_is_left_out(tmp_path):
    known = ({"device": "H200", "engine": "recorded"}, {"device": "H200", "precision": "tf32", "engine": "auto"}, {})
    records = [replace(with_spec(make("hat", 0), seed=k), versions=versions) for k, versions in enumerate(known)]
    write_page(RECIPE, index(records), tmp_path)
    line = "Measured on: H200, recorded; H200, tf32, engine not recorded."
    assert line in (tmp_path / f"{RECIPE.name}.md").read_text()


@pytest.mark.parametrize(("notice", "option"), [("", ""), ("This is small.", " --quick")])
def test_the_page_of_the_quick_version_names_its_own_command(notice, option, records, tmp_path):
    page = write_page(RECIPE, records, tmp_path, notice).read_text()
    command = f"hatrack reproduce {RECIPE.name}"
    assert page.count(command + option) == page.count(command) > 2
    assert ("--quick" in page) == bool(option)
    assert f"{command}{option}\n" in (tmp_path / f"{RECIPE.name}.md").read_text()


@pytest.mark.parametrize("notice", ["", "This is small."])
def test_a_page_in_another_folder_names_the_command_that_writes_it(notice, records, tmp_path):
    page = write_page(RECIPE, records, tmp_path, notice, "my pages").read_text()
    markdown = (tmp_path / "toy.md").read_text()
    quick = " --quick" if notice else ""
    assert f"<!-- Written by `hatrack reproduce toy{quick} --page --out 'my pages'`." in markdown
    assert f"hatrack reproduce toy{quick} --out 'my pages'\n" in markdown
    assert page.count("reproduce toy --") + page.count(f"hatrack reproduce toy{quick} --out") > 2
    assert "docs/results" not in page + markdown


def test_a_page_without_any_record(tmp_path):
    """Rows with published numbers are in the table, the others in a line; no note is about a row that was not run."""
    page = write_page(RECIPE, Records(), tmp_path).read_text()
    markdown = (tmp_path / "toy.md").read_text()
    assert re.findall(r"^\| (\w+) \| 0 \|", markdown, re.MULTILINE) == ["HAT", "SGD", "EWC"]
    for text in (page, markdown):
        assert "Not run yet: joint; random." in text
        assert "It is plain." not in text


def test_a_part_of_which_nothing_is_published_or_run_has_no_table():
    rows = tuple(replace(row, published={}) for row in PART.rows)
    text = page_texts(replace(RECIPE, parts=(replace(PART, rows=rows, claims=()),)), Records())["toy.md"]
    assert "Not run yet: HAT; SGD; EWC; joint; random." in text
    assert "| approach |" not in text


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
