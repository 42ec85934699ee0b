"""A report and the end of a run name what was held whole, and count it in no other sentence."""

from dataclasses import replace

from hatrack.reporting.endings import capacity_text
from hatrack.reporting.report import report
from tests.helpers.records import make, save

HELD = "attention.in_proj_weight (held whole: bmm)"


def test_what_is_held_whole_is_in_the_report(tmp_path):
    record = replace(make("hat", 0), usage=[{"a": 0.5, HELD: 1.0}] * 2)
    assert HELD in record.held
    assert "a, is 50% taken" in capacity_text([record])
    assert make("sgd", 0).held == ""
    page = report(save(tmp_path, [record, make("sgd", 0)])).read_text(encoding="utf-8")
    assert f"hat {record.held}" in page
    assert "held whole" not in report(save(tmp_path / "plain", [make("sgd", 0)])).read_text(encoding="utf-8")
