"""The times of EWC's penalty and Fisher on the page of 002, from the file that a command writes."""

import json
import re

import pytest

from hatrack.recipes import RECIPES
from hatrack.recipes.page import write_page
from hatrack.recipes.reproduce import read_records
from hatrack.recipes.results import Records, Results
from hatrack.recipes.timings import PART, fisher_times, read_timings, step_times

WRITTEN = {
    "network": "cnn",
    "batch": 64,
    "device": "a machine",
    "torch": "2.13.0",
    "rounds": 10,
    "steps": [
        {"tasks": 1, "sgd": 0.1, "l2": 0.125, "summed": 0.15, "naive": 0.15, "naive / summed": [1.0, 0.9, 1.1]},
        {"tasks": 10, "sgd": 0.1, "l2": 0.125, "summed": 0.15, "naive": 0.6, "naive / summed": [4.0, 3.9, 4.1]},
        {"tasks": 20, "sgd": 0.1, "l2": 0.125, "summed": 0.15, "naive": 1.1, "naive / summed": [7.3, 7.2, 7.4]},
    ],
    "fisher": {"images": 2048, "fisher": 6.0, "epoch": 4.0, "fisher / epoch": [1.5, 1.4, 1.6]},
}


def put(folder, **changes):
    (folder / "timings").mkdir(parents=True, exist_ok=True)
    (folder / "timings" / "cpu.json").write_text(json.dumps({**WRITTEN, **changes}))
    return folder


def verdicts(folder):
    results = Results(PART, read_records(folder))
    return [claim.holds(results) for claim in PART.claims]


def test_tables_by_hand(tmp_path):
    timings = read_timings(put(tmp_path))
    where = "cnn, batch 64, a machine, torch 2.13.0"
    assert step_times(timings).rows[2] == [where, "20", "100", "125", "150", "1,100", "1.50", "1.20", "7.33"]
    assert fisher_times(timings).rows == [[where, "2,048", "6.00", "4.00", "1.50", "5.0"]]  # 6 s of 120 s
    assert timings["cpu"].growth == pytest.approx(2)  # 1.0 against 0.5 s of penalty


def test_claims_follow_from_the_numbers(tmp_path):
    assert verdicts(put(tmp_path)) == [True, True, True, True, True]  # after one task, the only one of up to five
    five = {"tasks": 5, "sgd": 0.1, "l2": 0.125, "summed": 0.15, "naive": 0.36}
    assert verdicts(put(tmp_path, steps=[*WRITTEN["steps"], five])) == [True, False, True, True, True]
    slow = {**WRITTEN["fisher"], "fisher": 12.1}  # more than a tenth of 30 epochs of 4 s
    steps = [{**step, "summed": 0.1 + 0.01 * step["tasks"], "naive": 0.5} for step in WRITTEN["steps"]]
    assert verdicts(put(tmp_path, fisher=slow, steps=steps)) == [True, False, False, False, False]
    assert [claim.holds(Results(PART, Records())) for claim in PART.claims] == [None] * 5


def test_the_page_of_002_has_them(tmp_path):
    records = read_records(put(tmp_path))
    page = write_page(RECIPES["ewc-cnn"], records, tmp_path)
    for text in (page.read_text(), (tmp_path / "ewc-cnn.md").read_text()):
        assert "a machine" in text
        assert "7.33" in text
    assert re.search(r"figures/ewc-cnn-times-steps\.png", (tmp_path / "ewc-cnn.md").read_text())
    assert (tmp_path / "figures" / "ewc-cnn-times-steps.png").exists()


def test_an_older_file_has_no_l2(tmp_path):
    """What it tells is still told; the claims about L2 are open."""
    steps = [{key: value for key, value in step.items() if key != "l2"} for step in WRITTEN["steps"]]
    assert verdicts(put(tmp_path, steps=steps)) == [None, None, True, True, True]
    row = step_times(read_timings(tmp_path)).rows[2]
    assert row[1:] == ["20", "100", "—", "150", "1,100", "1.50", "—", "7.33"]


def test_another_file_is_refused_by_name(tmp_path):
    (tmp_path / "timings").mkdir()
    for text in ("[]", "{", json.dumps({**WRITTEN, "steps": [{"tasks": 1}]})):
        (tmp_path / "timings" / "cpu.json").write_text(text)
        with pytest.raises(ValueError, match=r"cpu\.json"):
            read_timings(tmp_path)
