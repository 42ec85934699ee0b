"""Comparable budgets: which methods are left out, and what is said about them."""

import re
from dataclasses import replace

import pytest

from hatrack import report
from hatrack.__main__ import main
from hatrack.experiments.record_parts import Costs
from hatrack.experiments.records import records
from hatrack.reporting.budget import parse_budget, within_budget
from hatrack.reporting.tables import ranking, settings
from tests.helpers.records import Reader, make, save

ALONE = [[0.95, 0.10], [0.95, 0.90]]


def costing(method, seed=0, *, weights=100, steps=10, accuracy=None, **spec):
    kept = {"weights": weights, "buffers": 0, "masks": 0, "images": 0}
    return replace(make(method, seed, accuracy, **spec), costs=Costs(kept, steps=steps, flops=1000 * steps))


def some():
    """Plain SGD at two seeds with 100 bytes and 10 and 14 steps, a larger and a longer method, and a reference."""
    plain = [costing("sgd"), costing("sgd", 1, steps=14)]
    return [
        *plain,
        costing("hat", weights=150),
        costing("hat", 1, weights=170),
        costing("independent", weights=200, steps=24, accuracy=ALONE),
        costing("joint", weights=9000, steps=1000),
    ]


def within(text, base="sgd", found=None):
    (setting,) = settings(found or some())
    return within_budget(setting, parse_budget(text, base))


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("bytes=1.5x", {"sgd", "joint"}),  # hat has 160 on average
        ("bytes=1.6x", {"sgd", "hat", "joint"}),
        ("bytes=1.6", {"sgd", "hat", "joint"}),
        ("bytes=2x,steps=1.9x", {"sgd", "hat", "joint"}),  # independent has 24 steps, twice the mean of 10 and 14
        ("bytes=2x, steps=2x", {"sgd", "hat", "independent", "joint"}),
        ("flops=1x", {"sgd", "hat", "joint"}),
    ],
)
def test_methods_that_cost_more_are_left_out_and_references_stay(text, kept):
    assert within(text).methods.keys() == kept


def test_a_line_says_which_and_why():
    lines = within("steps=5x,bytes=1.5x").left_out
    assert sorted(line.split()[0] for line in lines) == ["hat", "independent"]
    (hat,) = (line for line in lines if line.startswith("hat"))
    assert all(part in hat for part in ("bytes", "1.6 times", "sgd", "1.5"))
    assert within("bytes=2x").left_out == ()


def test_the_base_may_be_another_method():
    assert within("bytes=1.2x", "hat").methods.keys() == {"sgd", "hat", "joint"}


def test_what_is_left_out_still_serves_intransigence():
    setting = within("bytes=1.6x")
    sgd = next(row for row in ranking(setting) if row.label == "sgd")
    assert sgd.measures["intransigence"] == (pytest.approx((0.05 + 0.10) / 2), None, 1)


def test_a_method_without_costs_is_left_out():
    setting = within("bytes=2x", found=[costing("sgd"), make("hat")])
    assert setting.methods.keys() == {"sgd"}
    assert "hat" in setting.left_out[0]
    assert "bytes" in setting.left_out[0]


@pytest.mark.parametrize(
    "text", ["bytes", "bytes=", "bytes=x", "bytes=0.5x", "bytes=nan", "bytes=inf", "bytes=2y", "bites=2x"]
)
def test_a_wrong_budget_is_refused_in_one_line(text):
    with pytest.raises(ValueError, match="bytes") as error:
        parse_budget(text)
    assert "\n" not in str(error.value)


def test_a_base_that_is_missing_or_has_no_costs_is_named():
    with pytest.raises(ValueError, match=r"sgd.*digits-and-clothes"):
        within("bytes=2x", found=[costing("hat")])
    with pytest.raises(ValueError, match=r"sgd.*bytes"):
        within("bytes=2x", found=[make("sgd"), costing("hat")])


def test_the_page_and_the_tables_say_what_is_left_out(tmp_path, capsys):
    folder = save(tmp_path / "records", some())
    page = Reader(report(folder, tmp_path / "page", budget="bytes=1.5x").read_text(encoding="utf-8"))
    notes = " ".join(page.texts("li", kind="note"))
    assert "hat is left out" in notes
    assert not [row for row in page.rows if row and row[0].strip().startswith("hat")]
    words = ["table", str(folder), "--budget", "bytes=1.5x"]
    for form, start in (("markdown", "hat is left out"), ("latex", "% hat is left out")):
        assert main([*words, "--format", form]) == 0
        out, err = capsys.readouterr()
        assert any(line.startswith(start) for line in out.splitlines())
        assert "hat is left out" in err
    assert main([*words, "--format", "csv"]) == 0
    out, err = capsys.readouterr()
    assert "left out" not in out
    assert "hat is left out" in err
    assert main([*words[:2], "--budget", "bites=2x"]) == 2
    assert main([*words, "--budget-of", "ewc"]) == 2
    assert (
        main(["report", str(folder), "--out", str(tmp_path / "other"), "--budget", "bytes=1.6x", "--budget-of", "sgd"]) == 0
    )


@pytest.mark.parametrize(
    ("base", "said"),
    [("had", "no method 'had'; did you mean 'hat'?"), ("hat", "budget_of is 'hat', but there is no budget")],
)
def test_a_base_without_a_budget_is_refused(base, said, tmp_path, capsys):
    folder = save(tmp_path, some())
    for command in ("report", "table"):
        assert main([command, str(folder), "--budget-of", base]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(ValueError, match=re.escape(said)):
        report(folder, budget_of=base)


def test_the_page_has_a_table_of_costs_if_records_have_them(tmp_path):
    with_costs = Reader(report(save(tmp_path / "a", some())).read_text(encoding="utf-8"))
    heads = next(row for row in with_costs.rows if "Weights, MB" in row)
    costs = ["Kept, MB", "Weights, MB", "Buffers, MB", "Masks, MB", "Stored examples, MB", "Steps", "Operations, GFLOP"]
    assert heads[-len(costs) :] == costs
    row = with_costs.row("independent")
    assert row[-len(costs) :] == ["0.000"] * 5 + ["24", "0.000"]
    without = Reader(report(save(tmp_path / "b", [make()])).read_text(encoding="utf-8"))
    assert not [row for row in without.rows if "Steps" in row]
    assert not [reference for reference in without.refers if reference not in without.ids]


def test_rows_of_records_have_costs_and_intransigence(tmp_path):
    rows = records(save(tmp_path, some())).rows()
    found = {(row["method"], row["seed"]): row for row in rows}
    assert found["hat", 1]["bytes"] == 170
    assert found["hat", 1]["steps"] == 10
    assert found["sgd", 0]["intransigence"] == pytest.approx((0.05 + 0.10) / 2)
    assert found["sgd", 1]["intransigence"] != found["sgd", 1]["intransigence"], "nan: no partner at this seed"
