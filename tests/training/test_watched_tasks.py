"""Watched tasks: the accuracy on every task after each epoch is that of `evaluate`, changes nothing, and survives kills."""

import dataclasses
import json

import pytest
import torch

from hatrack import METHODS, Record, Regime, Trainer, evaluate, run
from hatrack.__main__ import main
from hatrack.training.trainer import FitLoop
from tests.helpers.killing import OFTEN, assert_same, killed_at, spec, to_the_end
from tests.helpers.learning import UNTRAINED, learn, make
from tests.helpers.runs import small
from tests.helpers.tiers import QUICK, quick_and_slow
from tests.helpers.toys import toy_tasks

pytestmark = pytest.mark.filterwarnings("ignore:task .* finds under 5% free")


@pytest.mark.parametrize("name", quick_and_slow(METHODS, (*QUICK, "er", "packnet", "pnn")))
def test_watching_changes_nothing_of_what_is_learned(name):
    tasks = toy_tasks(3)
    states = []
    for watched in ((), tasks):
        method = make(name, tasks)
        fit = learn(method, tasks, Trainer(Regime(epochs=3, batch=16, lr=0.1), watch_tasks=watched))
        states.append(method.state_dict())
        for result in fit.fits:
            assert [len(row) for row in result.watched] == [3] * len(result.epochs) if watched else not result.watched
    assert bool(fit.fits) == (name not in UNTRAINED)
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_the_values_are_those_of_evaluate_after_each_epoch(monkeypatch):
    tasks = toy_tasks(2)
    method, epoch, seen = make("sgd", tasks), FitLoop.epoch, []

    def epoch_and_evaluate(self):
        epoch(self)
        seen.append([evaluate(method, task.test).accuracy for task in tasks])

    monkeypatch.setattr(FitLoop, "epoch", epoch_and_evaluate)
    fit = learn(method, tasks, Trainer(Regime(epochs=5, batch=16, lr=0.1), watch_tasks=tasks))
    assert [row for result in fit.fits for row in result.watched] == seen
    assert len({tuple(row) for row in seen}) > 1, "something was learned"


def test_the_trainer_takes_tasks_that_the_network_knows():
    tasks = toy_tasks(3)
    with pytest.raises(ValueError, match="watch_tasks"):
        Trainer(watch_tasks=[1, 2])
    fit = Trainer(Regime(epochs=1), watch_tasks=tasks)
    with pytest.raises(ValueError, match="add_task"):
        learn(make("sgd", tasks, known=2), tasks[:1], fit)
    assert not fit.fits


def test_the_record_holds_every_epoch_and_the_same_results(tmp_path):
    plain, watching = small(regime=Regime(epochs=2, batch=100)), small(regime=Regime(epochs=2, batch=100), watch_tasks=True)
    without, record = run(plain, tmp_path), run(watching, tmp_path)
    assert [len(curve.watched) for curve in record.curves] == [2, 2]
    assert record == Record.load(tmp_path / f"{watching.name}.json")
    assert record.accuracy == without.accuracy
    assert [dataclasses.replace(curve, watched=[]) for curve in record.curves] == without.curves
    for t, curve in enumerate(record.curves):  # after the epoch whose weights were kept
        assert curve.watched[curve.best] == record.accuracy[t]
    assert "watch_tasks" not in plain.spec
    assert watching.name != plain.name
    assert all("watched" not in curve for curve in json.loads((tmp_path / f"{plain.name}.json").read_text())["curves"])


@pytest.mark.parametrize("method", quick_and_slow(["hat", "imm-mode", "pathnet"], ["hat", "imm-mode"]))
def test_killed_anywhere_it_goes_on_to_the_same_record(method, tmp_path, monkeypatch):
    one = dataclasses.replace(spec(method), watch_tasks=True)
    whole = run(one)
    kills = killed_at(monkeypatch, 0.1, seed=sum(map(ord, method)), most=4)
    again = to_the_end(one, tmp_path, save_every=OFTEN)
    assert kills
    assert all(curve.watched for curve in whole.curves)
    assert_same(whole, again)


@pytest.mark.parametrize("watched", [[[0.5, 0.5]] * 2, [[0.5]], [[0.5, 1.5]], "x"])
def test_a_record_with_other_values_is_refused(watched, tmp_path):
    one = small(watch_tasks=True)
    path = run(one, tmp_path).save(tmp_path)
    data = json.loads(path.read_text())
    del data["digest"]
    path.write_text(json.dumps(data))
    assert Record.load(path), "a control: without a digest it is read"
    data["curves"][1]["watched"] = watched
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"curves\[1\]\.watched"):
        Record.load(path)


def test_the_option_of_the_command(tmp_path):
    words = ["run", "smnist", "sgd", "--data", "sample", "--widths", "9", "--epochs", "1", "--device", "cpu"]
    assert main([*words, "--watch-tasks", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    assert [len(row) for curve in Record.load(path).curves for row in curve.watched] == [2, 2]
