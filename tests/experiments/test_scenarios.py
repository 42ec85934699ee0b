"""Runs in the three scenarios: the same record when stopped, in parallel and with compiled steps; what a record tells."""

import dataclasses
import json

import pytest
import torch

from hatrack import Record, Regime, Run, run
from hatrack.__main__ import main
from hatrack.experiments.build import build, build_tasks
from hatrack.experiments.parallel import run_all
from tests.helpers.killing import OFTEN, assert_same, killed_at, to_the_end
from tests.helpers.runs import small
from tests.helpers.tiers import every_value

PAIRS = {"data": "sample", "tasks": 5}


def scenario_run(scenario: str, method: str = "sgd", seed: int = 0, **changes) -> Run:
    regime = Regime(batch=100, **{"epochs": 2, "optimizer": "adam", "lr": 0.003, "keep_state": True, **changes})
    return small(method, seed, benchmark_options=PAIRS, scenario=scenario, regime=regime)


@pytest.mark.parametrize(
    ("scenario", "heads", "outputs"), [("task", "multi", 2), ("domain", "shared", 2), ("class", "class", 10)]
)
def test_the_scenario_decides_the_head_and_the_labels(scenario, heads, outputs):
    tasks, method = build(scenario_run(scenario))
    assert method.net.kind == heads
    assert method(tasks[4].test.inputs(torch.arange(3)), 4).shape == (3, outputs)
    labels = [sorted(set(task.test.y.tolist())) for task in tasks]
    assert labels == [[2 * k, 2 * k + 1] if scenario == "class" else [0, 1] for k in range(5)]


def test_a_record_of_before_keeps_its_name():
    spec = small()
    assert "scenario" not in spec.spec
    assert "steps" not in spec.spec["regime"]
    assert not {"normalise", "order"} & set(spec.spec["benchmark_options"])
    assert spec.name == dataclasses.replace(spec, scenario="task").name
    assert len({dataclasses.replace(spec, scenario=s).name for s in ("task", "domain", "class")}) == 3


@pytest.mark.parametrize("scenario", ["domain", "class"])
def test_a_run_can_be_made_again_from_its_record(scenario, tmp_path):
    spec = scenario_run(scenario)
    record = run(spec, tmp_path)
    assert record.spec.scenario == scenario
    again = Record.load(next(tmp_path.glob("*.json")))
    assert Run.from_spec(again.spec.written) == spec
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page")]) == 0
    assert f"--scenario {scenario}" in (tmp_path / "page" / "report.html").read_text()


@pytest.mark.slow
def test_class_is_harder_than_domain_and_domain_than_task():
    found = {s: run(scenario_run(s, epochs=5)) for s in ("task", "domain", "class")}
    task, domain, classes = (record.summary["accuracy"] for record in found.values())
    assert task > domain > classes
    record = found["class"]
    assert record.without_task_id == record.accuracy[-1], "the task is unknown anyway"
    assert max(record.accuracy[-1][:-1]) < 0.5 < record.accuracy[-1][-1]
    assert all(len(row) == 5 and None not in row for row in record.accuracy)
    assert all(loss is not None for row in record.loss for loss in row)


def test_joint_training_knows_all_classes():
    record = run(dataclasses.replace(scenario_run("class", "joint", epochs=8), method_options={"at": (5,)}))
    assert record.summary["accuracy"] > 0.6


@pytest.mark.parametrize(("method", "scenario"), every_value(["si", "derpp", "lwf"], ["domain", "class"]))
def test_stopped_anywhere_a_run_goes_on_to_the_same_record(method, scenario, tmp_path, monkeypatch):
    spec = scenario_run(scenario, method)
    whole = run(spec, tmp_path / "whole")
    kills = killed_at(monkeypatch, 0.1, seed=3, most=4)
    again = to_the_end(spec, tmp_path / "again", save_every=OFTEN)
    assert kills
    assert_same(whole, again)


@pytest.mark.slow
def test_runs_at_the_same_time_give_the_same_records(tmp_path):
    runs = [scenario_run(scenario) for scenario in ("domain", "class")]
    one, two = (run_all(runs, tmp_path / str(n), parallel=n) for n in (1, 2))
    for a, b in zip(one, two, strict=True):
        assert json.dumps(a.accuracy) == json.dumps(b.accuracy)


def test_the_command_line_refuses_and_lists(capsys, tmp_path):
    words = ["--data", "sample", "--scenario", "class", "--device", "cpu", "--out", str(tmp_path)]
    assert main(["run", "smnist", "hat", *words]) == 2
    error = capsys.readouterr().err
    assert "hat is not defined in the scenario 'class'" in error
    assert "--scenario task" in error
    assert main(["run", "smnist", "sgd", "--heads", "multi", *words]) == 2
    assert "--heads multi does nothing with --scenario class" in capsys.readouterr().err
    assert main(["run", "smnist", "sgd", "--steps", "3", "--epochs", "2", *words]) == 2
    assert "--epochs does nothing with --steps 3" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert main(["run", "smnist", "sgd", "--with-references", "--dry-run", *words]) == 0
    listed = capsys.readouterr().out
    assert "joint" in listed
    assert "independent" not in listed, "it is not defined there"
    assert main(["list", "lfl"]) == 0
    assert "scenarios: task, domain\n" in capsys.readouterr().out


def test_normalisation_and_order_of_split_mnist():
    tasks = build_tasks(
        dataclasses.replace(scenario_run("class"), benchmark_options={**PAIRS, "normalise": False, "order": "seed"}), "cpu"
    )
    x = tasks[0].test.inputs(torch.arange(5))
    assert x.min() == 0
    assert 0.9 < x.max() <= 1
    digits = [int(d) for task in tasks for d in task.name.removeprefix("digits ").split(", ")]
    assert sorted(digits) == list(range(10))
    assert digits != sorted(digits)
    plain = {task.name[7]: task for task in build_tasks(scenario_run("task"), "cpu")}  # by its first digit
    first, second = digits[:2]
    images = {d: plain[str(d - d % 2)].test for d in (first, second)}
    for label, digit in enumerate((first, second)):
        wanted = images[digit].rows[images[digit].y == digit % 2]
        assert torch.equal(tasks[0].test.rows[tasks[0].test.y == label], wanted)
