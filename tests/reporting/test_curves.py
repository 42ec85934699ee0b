"""Accuracies on every task after each epoch: their order, over which seeds they are a mean, and the page's data of them."""

from dataclasses import replace

import numpy as np
import pytest

from hatrack.experiments.record import Record
from hatrack.reporting.chart_data import chart_data
from hatrack.reporting.curves import mean_watched, watched
from hatrack.reporting.drawing import looks_of
from hatrack.reporting.tables import settings
from tests.helpers.records import make, with_spec


def watching(seed: int = 0, method: str = "sgd", shift: float = 0.0, epochs: int = 3) -> Record:
    """A record of two tasks whose accuracies after each epoch are given."""
    record = with_spec(make(method, seed), watch_tasks=True)
    rows = [[[0.1, 0.2], [0.3, 0.2], [0.9, 0.2]], [[0.7, 0.5], [0.5, 0.6], [0.5, 0.8]]]
    curves = [
        replace(curve, epochs=curve.epochs[:epochs], watched=[[a + shift for a in row] for row in part[:epochs]])
        for curve, part in zip(record.curves, rows, strict=True)
    ]
    return replace(record, curves=curves)


def test_fits_follow_each_other() -> None:
    found = watched(watching())
    assert found is not None
    assert found.accuracy[:, 0].tolist() == [0.1, 0.3, 0.9, 0.7, 0.5, 0.5]
    assert found.starts == {0: 0, 1: 3}
    assert watched(make()) is None


def test_a_mean_over_seeds_of_equal_length() -> None:
    mean = mean_watched([watching(0), watching(1, shift=0.05)])
    assert mean is not None
    assert mean[0].accuracy[2] == pytest.approx([0.925, 0.225])
    assert mean[1] == ""
    uneven = mean_watched([make("sgd", 0), watching(1), watching(0, epochs=2)])
    assert uneven is not None
    np.testing.assert_array_equal(uneven[0].accuracy, watched(watching(1)).accuracy)
    assert uneven[1].endswith("seed 1")


def test_the_data_of_the_page() -> None:
    (setting,) = settings([watching(), make("hat")])
    found = {m["label"]: m for m in chart_data(setting, looks_of([setting]))["methods"]}
    assert found["hat"]["watched"] is None
    first, second = found["sgd"]["watched"]["lines"]
    assert first == [0, 0, [1000, 3000, 9000, 7000, 5000, 5000]]
    assert second == [1, 3, [2000, 2000, 2000, 5000, 6000, 8000]], "the second task begins after three epochs"
    curves = found["hat"]["curves"]
    assert curves == [[[0, 0, 1, [5000, 7000, 6000]], [1, 3, 1, [5000, 7000, 6000]]]]


def test_many_epochs_are_thinned_out() -> None:
    record = make("sgd")
    points = [record.curves[0].epochs[0]._replace(valid_accuracy=k / 1e5) for k in range(40_000)]
    long = [replace(curve, epochs=points) for curve in record.curves]
    (setting,) = settings([replace(record, curves=long)])
    (method,) = chart_data(setting, looks_of([setting]))["methods"]
    (task, start, step, values) = method["curves"][0][1]
    assert (task, start) == (1, 40_000)
    assert step == 2, "60,000 points for 80,000 epochs"
    assert values[100] == round(10_000 * 200 / 1e5)


def test_a_run_with_and_one_without_are_one_run() -> None:
    (setting,) = settings([make(), watching(), make("hat")])
    assert [record.spec.watch_tasks for record in setting.methods["sgd"]] == [True]
    other = watching()
    other.accuracy[1][1] += 0.01
    with pytest.raises(ValueError, match="different results"):
        settings([make(), other])
