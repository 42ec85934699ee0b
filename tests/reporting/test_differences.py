"""The part of the page on differences between methods, and what it says to doubt."""

from dataclasses import replace

from hatrack.experiments.record_parts import Curve, CurvePoint
from hatrack.reporting.differences import cautions, differences
from hatrack.reporting.tables import settings
from tests.helpers.records import in_order, make


def rows(name, *levels):
    return [make(name, seed, [[level, 0.2], [level, level]]) for seed, level in enumerate(levels)]


def test_the_table_of_differences():
    (setting,) = settings([*rows("hat", 0.8, 0.9, 0.7), *rows("sgd", 0.5, 0.61, 0.39)])
    (row,) = differences(setting)["rows"]
    assert row == ["hat", "sgd", "30.0", "27.5 to 32.5", "29.0 to 31.0", "3 of 3 seeds", "< 0.001", "ahead"]


def test_fewer_than_three_seeds():
    (setting,) = settings([*rows("hat", 0.8, 0.9), *rows("sgd", 0.5, 0.61)])
    assert differences(setting)["rows"][0][-2:] == ["—", "too few seeds"]
    (alone,) = settings(rows("hat", 0.8, 0.9))
    assert differences(alone)["rows"] == []
    assert "one method" in differences(alone)["text"]


def test_a_method_whose_own_part_had_no_effect():
    sgd, ewc = rows("sgd", 0.8, 0.7), rows("ewc", 0.8, 0.7)
    (said,) = cautions(settings(sgd + ewc)[0])
    assert in_order(said, "ewc", "sgd")
    assert not cautions(settings([*sgd, *rows("ewc", 0.8, 0.71)])[0]), "at one seed alone it may be chance"


def test_a_method_at_chance():
    """The tasks of these records have three classes."""
    (said,) = cautions(settings(rows("hat", 0.34, 0.36))[0])
    assert in_order(said, "hat", "guessing")
    assert not cautions(settings(rows("hat", 0.34, 0.5))[0])
    assert not cautions(settings(rows("random", 0.33, 0.33))[0]), "a reference"


def test_chance_in_a_growing_head():
    """Two tasks of three classes: the first is guessed among three, the second among six, so that 1/4 is chance."""

    def growing(*levels):
        found = [make("hat", seed, [[level, 0.0], [level, level]]) for seed, level in enumerate(levels)]
        return settings([replace(record, spec=record.spec.replace(scenario="class")) for record in found])[0]

    (said,) = cautions(growing(0.26, 0.27))
    assert in_order(said, "hat", "guessing")
    assert not cautions(growing(0.26, 0.29))


def test_a_training_loss_that_grew():
    def with_losses(*losses):
        curve = Curve(0, 0, [CurvePoint(0.1, loss, None, None) for loss in losses])
        return cautions(settings([replace(make("hat"), curves=[curve])])[0])

    assert not with_losses(2.0, 1.0)
    assert not with_losses(2.0)
    assert in_order(*with_losses(1.0, 0.5, 1.5), "hat", "grew", "one run")
    assert with_losses(1.0, None)
