"""Figures over epochs: where the accuracy on every task after each epoch stands, and over which seeds it is a mean."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hatrack.experiments.record import Record
from hatrack.reporting.curves import mean_watched, watched, watched_tasks
from hatrack.reporting.report import report
from hatrack.reporting.tables import settings
from tests.helpers.records import Reader, make, save, with_spec


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


def test_lines_of_a_panel() -> None:
    (setting,) = settings([watching(), make("hat")])
    figure = watched_tasks(setting, "sgd")
    assert figure is not None
    (axes,) = figure.axes
    lines = [line for line in axes.lines if len(line.get_xdata()) != 2]
    by_colour: dict[object, list[list[float]]] = {}
    for line in lines:
        by_colour.setdefault(line.get_color(), []).append(np.round(line.get_ydata(), 6).tolist())
    before, after = by_colour[axes.lines[-2].get_color()]
    assert (before, after) == ([20, 20, 20, 50], [50, 60, 80])
    borders = [line.get_xdata()[0] for line in axes.lines if len(line.get_xdata()) == 2]
    assert borders == [0.5, 3.5]
    assert axes.get_ylim()[0] == 10, "the lowest accuracy of a task since it was begun"
    assert watched_tasks(setting, "hat") is None


def test_the_page_has_a_panel_per_method(tmp_path: Path) -> None:
    page = Reader(report(save(tmp_path, [watching(), watching(1), make("hat")])).read_text(encoding="utf-8"))
    labels = [e.attributes["aria-label"] for e in page.elements if e.tag == "svg"]
    assert [label.split(":")[0] for label in labels if "after each epoch" in label] == ["sgd"]
    assert (tmp_path / "figures" / "digits-and-clothes-watched-sgd.png").exists()


def test_a_run_with_and_one_without_are_one_run() -> None:
    (setting,) = settings([make(), watching(), make("hat")])
    assert [record.spec.watch_tasks for record in setting.methods["sgd"]] == [True]
    other = watching()
    other.accuracy[1][1] += 0.01
    with pytest.raises(ValueError, match="different results"):
        settings([make(), other])
