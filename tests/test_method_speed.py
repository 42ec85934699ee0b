"""`python -m speed.many_tasks` and `python -m speed.methods`: every method is measured, nothing stays changed."""

import time

import pytest
import torch

from hatrack import METHODS
from speed import many_tasks, methods
from speed.step import in_turns


@pytest.mark.parametrize("name", [name for name in METHODS if name != "random"])
def test_every_method_is_measured(name):
    """Also those that fit a task several times, or ask for the regime."""
    first, ratios = many_tasks.growth(name, [2, 3], (8, 8), rounds=2)
    assert first > 0
    assert len(ratios) == 1
    assert ratios[0] > 0


def test_what_is_measured_is_rolled_back():
    method = many_tasks.after("hat", 1, (8, 8))
    before = {key: value.clone() for key, value in method.state_dict().items()}
    seconds = in_turns([method], [many_tasks.noise(1)], 3, time.process_time)
    assert len(seconds[0]) == 3
    assert [*method.history] == [0]
    assert all(torch.equal(value, before[key]) for key, value in method.state_dict().items())


def test_verdicts():
    assert many_tasks.verdict("hat", 1.1) == "reached"
    assert many_tasks.verdict("hat", 1.2) == "MISSED"
    assert many_tasks.verdict("lwf", 9.0).startswith("grows: a distillation term")
    assert many_tasks.GROW.keys() <= METHODS.keys()


def test_the_table_of_methods(tmp_path, capsys, monkeypatch):
    out = tmp_path / "table.md"
    words = ["methods", "--networks", "mlp,resnet18", "--methods", "den", "--batch", "2", "--rounds", "1", "--out", str(out)]
    monkeypatch.setattr("sys.argv", words)
    methods.main()
    assert capsys.readouterr().out == out.read_text()
    cells = out.read_text().splitlines()[-1].strip("| ").split(" | ")
    assert cells[0] == "den"
    assert float(cells[1]) > 0
    assert cells[2] == "no", "den follows linear layers only"
