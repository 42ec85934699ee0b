"""The sentences of a report: their numbers and names, and the commands they recommend."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from hatrack.__main__ import main
from hatrack.experiments.record_parts import Spec
from hatrack.experiments.run import Run
from hatrack.options import parameters
from hatrack.regime import Regime
from hatrack.reporting.tables import settings
from hatrack.reporting.words import RUN_OPTIONS, caution, command, summary
from tests.helpers.records import ACCURACY, in_order, make

EVERYTHING = [make(method, seed) for method, seed in ACCURACY]


def test_the_summary_names_what_was_forgotten_and_the_best_method() -> None:
    text = summary(settings(EVERYTHING)[0])
    # forgetting of sgd: (0.90 - 0.50 + 0.80 - 0.70) / 2; accuracy of hat: (0.90 + 0.70 + 0.80 + 0.76) / 4
    assert in_order(text, "(mlp)", "two tasks", "two methods", "two references", "two seeds")
    assert in_order(text, "forgetting", "25.0", "sgd", "0.0", "hat")
    assert in_order(text, "hat", "79.0 %", "sgd", "68.8 %", "too few seeds", "joint", "87.5 %", "guessing", "33.8 %")
    assert "highest" not in text


def test_a_winner_is_named_if_it_is_ahead_and_a_tie_is_called_a_tie() -> None:
    """Three seeds; at each of them sgd is far below, while hat and ewc take turns."""
    levels = {"hat": (0.80, 0.81, 0.84), "sgd": (0.60, 0.62, 0.63), "ewc": (0.81, 0.80, 0.83)}
    records = {
        name: [make(name, seed, [[value, 0.3], [value, value]]) for seed, value in enumerate(values)]
        for name, values in levels.items()
    }
    won = summary(settings(records["hat"] + records["sgd"])[0])
    assert in_order(won, "hat", "ahead of all other methods", "average accuracy of 81.7 %")
    tied = summary(settings([*records["hat"], *records["sgd"], *records["ewc"]])[0])
    assert in_order(tied, "hat (81.7 %)", "ewc (81.3 %)", "tied", "highest")
    few = summary(settings([*records["hat"], *records["sgd"], records["ewc"][0]])[0])
    assert in_order(few, "hat", "ahead of all other methods", "ewc has too few seeds")


def test_two_methods_that_are_equal_are_not_called_the_highest() -> None:
    first, second = make("hat"), make("sgd", accuracy=ACCURACY["hat", 0])
    assert "highest" not in summary(settings([first, second])[0])
    assert in_order(summary(settings([first, second])[0]), "forgetting is 0.0", "hat and sgd")
    assert "highest" not in summary(settings([first])[0])


def test_a_single_task_has_no_forgetting() -> None:
    text = summary(settings([make("hat", accuracy=[[0.9]])])[0])
    assert in_order(text, "one task", "one method", "one seed", "hat", "90.0 %")
    assert "percentage points" not in text
    assert "average" not in text


def test_variants_of_a_method_are_not_called_methods() -> None:
    one, two, other = make("hat"), make("hat", method_options={"c": 1.5}), make("sgd")
    found = [re.findall(r"(\w+) methods?\b(?: in (\w+) variants)?", summary(settings(records)[0]))[0]
             for records in ([one], [one, two], [one, two, other], [one, other])]  # fmt: skip
    assert found == [("one", ""), ("one", "two"), ("two", "three"), ("two", "")]


def test_a_short_regime_is_said_to_be_short() -> None:
    assert caution(settings([make()])[0]) == ""
    assert in_order(caution(settings([make(regime=Regime(epochs=199))])[0]), "199 epochs", "200")
    assert caution(settings([make(regime=Regime(epochs=5, schedule="constant"))])[0]) == ""
    sample = caution(settings([make(benchmark_options={"data": "sample"})])[0])
    assert "sample" in sample
    assert "epoch" not in sample


def test_the_command_repeats_the_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the page tells a user to type gives records of the same setting."""
    run = {"network_options": {"widths": (300, 300)}, "benchmark_options": {"data": "sample"}, "heads": "shared"}
    record = make(regime=Regime(epochs=7, lr=0.01, restore=False), **run)
    line = command(settings([record])[0], "joint", [0, 1, 2, 5])
    options = "--heads shared --epochs 7 --lr 0.01 --no-restore --data sample --widths 300,300"
    assert line == f"hatrack run digits-and-clothes joint {options} --seeds 0,1,2,5"
    carried: list[Run] = []
    monkeypatch.setattr(
        "hatrack.experiments.parallel.run",
        lambda spec, *_, **__: carried.append(spec) or replace(record, spec=Spec.from_dict(spec.spec)),
    )
    assert main([*line.split()[1:], "--out", str(tmp_path)]) == 0
    assert [spec.seed for spec in carried] == [0, 1, 2, 5]
    assert carried[0].spec == {**record.spec.written, "method": "joint"}


def test_a_command_names_a_network_that_is_not_the_benchmark_s_own() -> None:
    assert "--network" not in command(settings([make()])[0], "joint", [0])
    assert "--network cnn" in command(settings([make(network="cnn")])[0], "joint", [0])


def test_all_options_of_a_run_can_be_part_of_a_command() -> None:
    assert tuple(parameters(Run)) == RUN_OPTIONS


def test_of_many_methods_all_that_forget_least_are_named() -> None:
    levels = {"sgd": 0.3, "ewc": 0.2, "si": 0.1, "lwf": 0.05, "hat": 0.0, "frozen": 0.0}
    (found,) = settings(make(name, 0, [[0.9, 0.1], [0.9 - lost, 0.9]]) for name, lost in levels.items())
    assert "the average forgetting is 30.0 percentage points for sgd; 0.0 for frozen and hat." in summary(found)
