"""Runs that were carried out in two ways are compared seed by seed."""

import numpy as np
import pytest

from hatrack import Record, run
from speed.alike import Comparison, cells, compare
from tests.helpers.runs import small

RIGHT = [[0.9, 0.5], [0.8, 0.7]]  # after each task: the accuracy on each


def with_accuracy(record: Record, change: float) -> Record:
    data = record.to_dict()
    accuracy = [[value + change for value in row] for row in RIGHT]
    return Record.from_dict({**{k: v for k, v in data.items() if k != "digest"}, "accuracy": accuracy})


@pytest.fixture(scope="module")
def record():
    return run(small())


def comparison(record: Record, changes: list[float]) -> Comparison:
    return Comparison("smnist sgd", [(with_accuracy(record, change), with_accuracy(record, 0.0)) for change in changes])


def test_noise_is_alike_and_a_shift_is_not(record):
    noise = comparison(record, [0.01, -0.01, 0.02, -0.015])
    assert noise.alike
    assert np.allclose(noise.differences, [1, -1, 2, -1.5])
    assert not comparison(record, [0.010, 0.011, 0.012, 0.009]).alike
    assert comparison(record, [0.0, 0.0]).alike


def test_numbers_by_hand(record):
    found = comparison(record, [0.01, 0.03])
    assert np.allclose(found.accuracies(0), [76, 78])
    assert found.forgets(1) == pytest.approx(0.1)
    assert found.steps_per_second(0) == pytest.approx(2 * record.costs.steps / record.seconds.total)
    # the mean is 2, its standard error 1, and Student's t with one degree of freedom has 12.706
    assert cells(found)[:6] == ["smnist sgd", "2", "77.00 ± 1.41", "75.00 ± 0.00", "+2.00 (-10.71 to +14.71)", "yes"]


def test_folders_are_compared_by_the_runs_that_both_have(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for seed in range(2):
        run(small(seed=seed), one)
    run(small(seed=1), two)
    for folder in (one, two):
        run(small(seed=1, network_options={"widths": (5,)}), folder)  # another setting, so another comparison
    run(small(seed=2), two)
    found, other = compare(one, two)
    assert found.title == "smnist sgd"
    assert [[pair[0].spec.seed for pair in each.pairs] for each in (found, other)] == [[1], [1]]
    assert found.alike
