"""`python -m speed.shares`: where the time of runs went, by hand."""

import sys
from dataclasses import replace

import pytest

from hatrack.experiments.record_parts import Costs, Seconds
from speed.shares import cells, groups, main
from tests.helpers.records import make, save


def timed(seed: int, total: float, steps: float):
    seconds = Seconds(total, [total / 2] * 2, {"steps": steps, "other": total - steps})
    return replace(make(seed=seed), seconds=seconds, costs=Costs(steps=1000))


def test_rates_and_shares_by_hand(tmp_path):
    """Two runs of 1000 steps side by side, which end after 10 and 20 seconds."""
    save(tmp_path, [timed(0, 10.0, 6.0), timed(1, 20.0, 12.0), make("hat")])
    (found,) = groups(tmp_path)
    assert len(found) == 2, "the other record does not tell"
    what = "digits-and-clothes sgd, mlp, None"
    assert cells(found) == [what, "2", "75", "100", "60.0", *["0.0"] * 6, "40.0"]
    save(tmp_path, [replace(timed(1, 20.0, 12.0), versions={"engine": "compiled"})])
    assert sorted(len(one) for one in groups(tmp_path)) == [1, 1], "engines are kept apart"


def test_a_folder_that_does_not_tell(tmp_path, monkeypatch):
    save(tmp_path, [make()])
    monkeypatch.setattr(sys, "argv", ["shares", str(tmp_path)])
    with pytest.raises(SystemExit, match="no record there tells"):
        main()
