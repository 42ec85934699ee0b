"""What a table costs on n GPUs."""

import random
from itertools import product

import pytest

from hatrack.__main__ import main
from hatrack.experiments.costs import time_on


def best(seconds, places):
    """The best of all ways to deal runs out, by trying them all."""
    ways = product(range(places), repeat=len(seconds))
    return min(max(sum(s for s, at in zip(seconds, way, strict=True) if at == k) for k in range(places)) for way in ways)


@pytest.mark.parametrize("seed", range(20))
def test_the_time_is_near_the_best(seed):
    draw = random.Random(seed)
    seconds, places = [draw.uniform(1, 10) for _ in range(7)], draw.choice([1, 2, 3])
    found = time_on(seconds, places)
    assert max(max(seconds), sum(seconds) / places) - 1e-9 <= best(seconds, places) <= found + 1e-9
    assert found <= best(seconds, places) * (4 / 3 - 1 / (3 * places)) + 1e-9, "Graham's bound"


def test_the_example_of_the_page():
    assert time_on([20.0] * 40, 1) == 800
    assert time_on([20.0] * 40, 8) == 100
    assert time_on([20.0] * 40, 64) == 20


def test_what_is_missing_on_gpus(tmp_path, capsys):
    words = ["reproduce", "regimes", "--only", "rotated", "--out", str(tmp_path)]
    assert main([*words, "--gpus", "8"]) == 2
    assert "--gpus 8 goes with --missing" in capsys.readouterr().err
    assert main(["reproduce", "regimes", "--missing", "--gpus", "8", "--out", "docs/results"]) == 0
    capsys.readouterr()
