"""How many places stacks have, which runs take them, and what becomes of them when a step fails or runs are stopped."""

import itertools
from dataclasses import replace

import pytest
import torch

from hatrack import METHODS, Regime, Run, Trainer
from hatrack.engine import stacked_steps
from hatrack.engine.interleaving import run_interleaved, stacking
from hatrack.engine.recorded import Recorded
from hatrack.engine.stack import Stack
from hatrack.experiments.parallel import kind_of, run_all
from hatrack.training.checkpoint import Checkpointer, Stopped, stopping
from tests.helpers.killing import spec
from tests.helpers.learning import make
from tests.helpers.stacking import Learned, assert_close
from tests.helpers.tiers import quick_and_slow
from tests.helpers.toys import toy_tasks

CPU = torch.device("cpu")
REGIME = Regime(epochs=2, batch=16, lr=0.1)


def maker(name, regime=REGIME, **how):
    def build(seed):
        tasks = toy_tasks(2, seed=seed, **how)
        return make(name, tasks, seed=seed), tasks, Trainer(regime, seed=seed, engine="eager")

    return build


@pytest.fixture
def driven(monkeypatch):
    """Of every group of steps that a stack did: its places, and how many of them had a run."""
    seen = []
    plain = Stack.drive

    def drive(stack):
        seen.append((stack.form.lanes, len(stack.members)))
        plain(stack)

    monkeypatch.setattr(Stack, "drive", drive)
    return seen


def test_a_stack_has_a_place_for_each_run_of_its_kind(driven):
    """Three methods with two seeds each: no stack has places for the runs of other methods."""
    names = ["hat", "ewc", "sgd"]
    runs = [(name, seed) for name in names for seed in (0, 1)]
    work = [lambda name=name, seed=seed: Learned(maker(name), seed) for name, seed in runs]
    stacked = run_interleaved(work, CPU, 6, stack=True, kinds=[name for name, _ in runs])
    assert_close([Learned(maker(name), seed) for name, seed in runs], stacked)
    assert {places for places, _ in driven} == {2}
    assert sum(live for _, live in driven) > 0.8 * sum(places for places, _ in driven)


def test_two_kinds_with_the_same_step_have_a_stack_each(driven):
    """Those of the second would find no place in the stack of the first."""
    runs = [(kind, seed) for kind in "ab" for seed in (0, 1)]
    work = [lambda seed=seed: Learned(maker("sgd"), seed) for _, seed in runs]
    stacked = run_interleaved(work, CPU, 4, stack=True, kinds=[kind for kind, _ in runs])
    assert_close([Learned(maker("sgd"), seed) for _, seed in runs], stacked)
    assert driven.count((2, 2)) > 0.8 * len(driven)


@pytest.mark.parametrize("name", quick_and_slow(["hat", "er"]))
def test_the_last_runs_of_a_stack_go_on_in_a_smaller_one(name, driven, monkeypatch):
    """Four of five end early; the last goes on with the same order of batches, dropout, optimizer and best epoch."""
    monkeypatch.setattr(stacked_steps, "FEW", 2)

    def build(seed):
        regime = Regime(epochs=2 if seed else 12, batch=16, optimizer="momentum", lr=0.05, keep_state=True)
        tasks = toy_tasks(2, seed=seed)
        return make(name, tasks, seed=seed), tasks[: 1 if seed else 2], Trainer(regime, seed=seed, engine="eager")

    stacked = run_interleaved([lambda s=s: Learned(build, s) for s in range(5)], CPU, 5, stack=True)
    assert_close([Learned(build, seed) for seed in range(5)], stacked)
    assert stacked[0].forgets() == (name == "er")
    assert driven[0] == (5, 5)
    assert driven[-1] == (1, 1)
    assert driven.count((5, 1)) < driven.count((1, 1)) / 4


class OnFixedMemory(Recorded):
    """Stands in for a recording: from its first call on it works on the weights where they lay then."""

    def __init__(self, function):
        self.function, self.held, self.moved = function, None, 0

    def __call__(self, *inputs):
        weights = [weight.data_ptr() for weight in self.function.__self__.weights.values()]
        self.held = self.held or weights
        self.moved += self.held != weights
        return self.function(*inputs)

    def forget(self):
        self.held = None


def test_a_recording_of_the_last_batch_is_forgotten_when_a_run_changes_its_stack(driven, monkeypatch):
    """The last batch of an epoch is smaller, and its step is recorded for each run alone."""
    monkeypatch.setattr(stacked_steps, "FEW", 1)
    recorded = []
    init = stacked_steps.StackedSteps.__init__

    def with_recording(self, step, alone, *given, **how):
        recorded.append(OnFixedMemory(alone))
        init(self, step, recorded[-1], *given, **how)

    monkeypatch.setattr(stacked_steps.StackedSteps, "__init__", with_recording)
    regimes = [replace(REGIME, epochs=epochs) for epochs in (1, 1, 4)]
    run_interleaved(
        [lambda seed=seed: Learned(maker("sgd", regimes[seed], train=50), seed) for seed in range(3)], CPU, 3, stack=True
    )
    assert {places for places, _ in driven} == {3, 1}
    assert [one.moved for one in recorded] == [0] * len(recorded)
    assert any(one.held for one in recorded)


def test_seeds_and_rates_make_no_other_kind():
    options = {"benchmark_options": {"data": "sample"}}
    first = Run("smnist", "hat", 0, regime=Regime(lr=0.1), **options)
    assert kind_of(first) == kind_of(Run("smnist", "hat", 1, regime=Regime(lr=0.2, epochs=3), **options))
    same = Run("smnist", "hat", 0, method_options={"c": 0.1, "validation": "total"}, **options)
    assert kind_of(first) == kind_of(same), "nor options that change no operation"
    others = [
        Run("smnist", "sgd", 0, **options),
        Run("smnist", "hat", 0, regime=Regime(batch=32), **options),
        Run("smnist", "hat", 0, method_options={"smax": 100.0}, **options),
        Run("smnist", "hat", 0, network_options={"widths": (10,)}, **options),
    ]
    assert kind_of(first) not in map(kind_of, others)


@pytest.mark.parametrize("name", quick_and_slow(["hat", "pmask"], ["hat"]))
def test_runs_whose_options_change_no_operation_share_a_stack(name, driven, tmp_path):
    """Their records are those of each run alone, to rounding."""
    other = {"c": 3.0, "embedding": "uniform", "gate_lr": 0.5, "validation": "total"}
    other = {option: value for option, value in other.items() if option in METHODS[name].same_step}
    runs = [replace(spec(name, batch=100, lr=0.01), method_options=options) for options in ({}, other)]
    assert kind_of(runs[0]) == kind_of(runs[1])
    alone = run_all(runs, tmp_path / "alone", engine="eager")
    stacked = run_all(runs, tmp_path / "stacked", parallel=2, stack=True, engine="eager")
    assert set(driven) == {(2, 2)}
    for one, two in zip(alone, stacked, strict=True):
        assert two.versions["engine"] == "eager, stacked"
        assert one.costs.steps == two.costs.steps
        assert numbers(one) == pytest.approx(numbers(two), rel=1e-3, abs=1e-3)
    assert numbers(alone[0]) != pytest.approx(numbers(alone[1]), rel=1e-2, abs=1e-2), (
        "the control: the options do change them"
    )


def numbers(record):
    """The losses of all epochs, and after each task the accuracies and the shares of layers that are used."""
    losses = [epoch.loss for curve in record.curves for epoch in curve.epochs]
    shares = [share for layers in record.usage for share in layers.values()]
    return losses + shares + [value for row in record.accuracy for value in row]


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].step_forms == "many"])
def test_a_step_with_the_heads_of_shuffled_tasks_is_that_of_one_seed(name):
    """LwF on eight sets had a stack of three places for each of three runs, with two of them always empty."""
    for benchmark in ("mixture-open", "cifar"):
        assert kind_of(Run(benchmark, name, 0)) != kind_of(Run(benchmark, name, 1))
    assert kind_of(Run("cifar100-5", name, 0)) == kind_of(Run("cifar100-5", name, 1)), "its tasks have 20 classes each"
    assert kind_of(Run("mixture-open", "hat", 0)) == kind_of(Run("mixture-open", "hat", 1))


def test_a_stack_that_nobody_could_join_takes_no_memory(monkeypatch):
    """Every fit of DEN made one, as large as all its places together, which stayed until the command ended."""

    def refuse(*_):
        raise RuntimeError("tensors of the step share their memory")

    def learn(seed):
        method, tasks, fit = maker("sgd")(seed)
        method.learn(tasks[0], fit)
        return len(stacking())

    monkeypatch.setattr(Stack, "_shared", refuse)
    with pytest.warns(UserWarning, match="share their memory"):
        left = run_interleaved([lambda s=s: learn(s) for s in range(2)], CPU, 2, stack=True)
    assert left == [0, 0]


def test_after_a_step_that_fails_nobody_goes_on_from_what_it_left(monkeypatch):
    """Another run would do the steps again from where the failed one stopped, and save the wrong state as its own."""
    plain, steps = Stack._compute, []

    def compute(stack):
        steps.append(stack)
        if len(steps) == 5:
            raise RuntimeError("Tried to allocate 20.00 GiB")
        plain(stack)

    monkeypatch.setattr(Stack, "_compute", compute)
    errors, places = [], []

    def learn(seed):
        method, tasks, fit = maker("hat")(seed)
        before = {key: value.clone() for key, value in method.state_dict().items()}
        try:
            method.learn(tasks[0], fit)
        except RuntimeError as error:
            errors.append(str(error))
            places.append(all(torch.equal(value, before[key]) for key, value in method.state_dict().items()))

    run_interleaved([lambda s=s: learn(s) for s in range(3)], CPU, 3, stack=True)
    assert len(errors) == 3
    assert all("20.00 GiB" in error for error in errors)
    assert len(steps) == 5
    assert all(places)


@pytest.mark.parametrize(
    ("names", "steps"),
    [(["hat"], (1, 10, 6)), pytest.param(["hat", "packnet"], (1, 40, 30), marks=pytest.mark.slow)],
    ids=["one method", "two methods"],
)
def test_stacked_runs_that_are_stopped_go_on_alone_or_beside_others(names, steps, tmp_path, monkeypatch):
    """With two seeds each, asked to stop in the first step and within epochs; in turn all of them stacked, three at a time,
    and one by one."""
    runs = [spec(name, seed, batch=100, lr=0.01) for name in names for seed in (0, 1)]
    whole = run_all(runs, tmp_path / "whole", parallel=8, stack=True, engine="eager")
    plain, done, asked = Checkpointer.after_step, [], iter(steps)

    def after_step(checkpointer, loop):
        done.append(loop)
        if len(done) == stop_at:
            stopping.set()
        plain(checkpointer, loop)

    monkeypatch.setattr(Checkpointer, "after_step", after_step)
    ways = itertools.cycle(({"parallel": 8, "stack": True}, {"parallel": 3, "stack": True}, {"parallel": 1}))
    again, stops = None, 0
    for way in ways:
        stop_at = next(asked, 0)
        done.clear()
        try:
            again = run_all(runs, tmp_path / "again", **way, engine="eager")
            break
        except Stopped:
            stops += 1
    assert stops == 3
    assert sorted(path.suffix for path in (tmp_path / "again").iterdir()) == [".json"] * len(runs)
    for one, two in zip(whole, again, strict=True):
        assert one.costs.steps == two.costs.steps
        assert one.versions["engine"] == "eager, stacked"
        for mine, other in zip(one.curves, two.curves, strict=True):
            losses = [torch.tensor([epoch.loss for epoch in curve.epochs]) for curve in (mine, other)]
            torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-3)
        assert two.loss[0][0] == two.loss[1][0], "nothing is forgotten, bit for bit"
