"""Tables for papers, and records as rows."""

import csv

import pytest

import hatrack as hr
from hatrack.__main__ import main
from hatrack.reporting.export import export
from hatrack.reporting.tables import settings
from tests.helpers.records import in_order, make, save


def levels(name, *values, **spec):
    return [make(name, seed, [[value, 0.2], [value, value]], **spec) for seed, value in enumerate(values)]


RECORDS = [
    *levels("hat", 0.80, 0.81, 0.84, method_options={"c": 1.5}),
    *levels("sgd", 0.60, 0.62, 0.63),
]


def test_markdown_with_options_as_columns_and_the_winner_in_bold():
    text = export(settings(RECORDS), "markdown")
    assert in_order(
        text, "| method | c | n | Average accuracy, %", "| hat | 1.5 | 3 | **81.7 ± 2.1**", "| sgd |  | 3 | 61.7"
    )
    tied = export(settings([*RECORDS, *levels("ewc", 0.81, 0.80, 0.83)]), "markdown")
    assert "81.7 ± 2.1" in tied
    assert "**81.7" not in tied, "ewc is as good"


def test_latex_is_escaped():
    text = export(settings([*RECORDS, *levels("hat", 0.5, 0.5, 0.5, method_options={"leave": "a_b&c"})]), "latex")
    assert in_order(text, r"\begin{tabular}{lrr", r"\toprule", r"\textbf{81.7 $\pm$ 2.1}", r"a\_b\&c", r"\end{tabular}")
    assert "±" not in text


def test_csv():
    rows = list(csv.DictReader(export(settings(RECORDS), "csv").splitlines()))
    assert [(row["method"], row["c"], row["ahead"]) for row in rows] == [("hat", "1.5", "yes"), ("sgd", "", "no")]


def test_the_command(tmp_path, capsys):
    save(tmp_path / "runs", RECORDS)
    assert main(["table", str(tmp_path / "runs"), "--format", "latex"]) == 0
    assert "tabular" in capsys.readouterr().out
    assert main(["table", str(tmp_path / "runs"), "--out", str(tmp_path / "t.md")]) == 0
    assert "**81.7" in (tmp_path / "t.md").read_text()
    assert main(["table", str(tmp_path / "runs"), "--format", "word"]) == 2
    assert main(["table", str(tmp_path / "none")]) == 2


def test_records_of_a_folder(tmp_path):
    found = hr.records(save(tmp_path / "runs", RECORDS))
    assert len(found) == 6
    row = next(row for row in found.rows() if row["method"] == "hat" and row["seed"] == 2)
    assert (row["c"], row["regime.lr"], row["accuracy"]) == (1.5, 0.05, pytest.approx(0.84))
    with pytest.raises(ValueError, match="no records in"):
        hr.records(tmp_path)


def test_pandas(tmp_path):
    found = hr.records(save(tmp_path / "runs", RECORDS))
    try:
        import pandas  # noqa: F401
    except ImportError:
        with pytest.raises(ValueError, match="pip install pandas"):
            found.to_pandas()
        return
    assert len(found.to_pandas().query("method == 'hat'")) == 3
