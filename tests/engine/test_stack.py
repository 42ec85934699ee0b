"""Runs that are stacked give the results of each alone, to rounding, and forget nothing."""

import pytest
import torch
from torch import nn

from hatrack import HAT, Method, Network, Regime, Trainer
from hatrack.engine import decompositions
from hatrack.engine.interleaving import run_interleaved
from hatrack.seeds import seeded
from tests.helpers.learning import OPTIMIZERS, make
from tests.helpers.pictures import convolutional, pictures
from tests.helpers.stacking import Learned, alone_and_stacked, assert_close
from tests.helpers.toys import toy_tasks

REGIME = Regime(epochs=3, batch=16, lr=0.1)
STACKED = ["sgd", "hat", "ewc", "si", "mas", "packnet", "pmask", "stable-sgd", "lwf", "er", "agem", "frozen", "independent"]


def maker(name, regime=REGIME, count=2, **how):
    def build(seed):
        tasks = toy_tasks(count, seed=seed, **how)
        return make(name, tasks, seed=seed), tasks, Trainer(regime, seed=seed, engine="eager")

    return build


@pytest.mark.parametrize("name", STACKED)
def test_stacked_runs_learn_what_each_learns_alone(name):
    """With dropout, of which every run draws its own numbers, and a last batch that is smaller."""
    assert_close(*alone_and_stacked(maker(name)))


def test_another_seed_would_be_seen():
    """The control: runs of other seeds are not close."""
    alone, stacked = alone_and_stacked(maker("hat"), seeds=(0, 1))
    with pytest.raises(AssertionError):
        assert_close(alone, stacked[::-1])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_is_stacked(optimizer):
    assert_close(*alone_and_stacked(maker("hat", Regime(epochs=2, batch=16, **OPTIMIZERS[optimizer])), seeds=(0, 1)))


@pytest.mark.parametrize("name", ["hat", "pmask", "packnet"])
def test_nothing_is_forgotten_bit_for_bit(name):
    """Under an optimizer that moves every weight it can reach; plain SGD is the control."""
    hard = Regime(epochs=3, batch=16, optimizer="adamw", lr=0.01, weight_decay=0.1, keep_state=True)
    runs = run_interleaved(
        [lambda s=s: Learned(maker(name, hard, 3), s) for s in range(2)], torch.device("cpu"), 2, stack=True
    )
    assert all("stacked" in engine for run in runs for engine in run.engines)
    assert not any(run.forgets() for run in runs)
    control = run_interleaved(
        [lambda s=s: Learned(maker("sgd", hard, 3), s) for s in range(2)], torch.device("cpu"), 2, stack=True
    )
    assert all(run.forgets() for run in control)


def test_convolutions_norms_and_pooling():
    """Also with the layouts of a GPU."""

    def build(seed):
        tasks = pictures(2)
        method = convolutional(tasks)
        return method, tasks, Trainer(REGIME, seed=seed, engine="eager")

    alone, stacked = alone_and_stacked(build, seeds=(0, 1))
    assert_close(alone, stacked)
    assert not any(run.forgets() for run in stacked)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "bias"), [(3, 1, 1, True), (3, 2, 1, False), (4, 3, 0, True), (1, 1, 0, True)]
)
@pytest.mark.parametrize("gpu", [False, True])
def test_every_plain_convolution(kernel, stride, padding, bias, gpu, monkeypatch):
    monkeypatch.setattr(decompositions, "on_gpu", lambda x: gpu)

    def build(seed):
        tasks = toy_tasks(1, shape=(2, 9, 9), seed=seed)
        with seeded(seed, "weights"):
            first = nn.Conv2d(2, 4, kernel, stride, padding, bias=bias)
            second = nn.Conv2d(4, 6, kernel, stride, kernel, bias=bias)
            trunk = nn.Sequential(
                first, nn.ReLU(), second, nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 8)
            )
        net = Network(trunk, [3], tasks[0].train.inputs(torch.arange(2)))
        return Method(net), tasks, Trainer(REGIME, seed=seed, engine="eager")

    assert_close(*alone_and_stacked(build, seeds=(0, 1)))


def test_other_lengths_rates_and_ends():
    """Runs whose tasks have other numbers of batches, which stop at other epochs, and which warm up."""
    regimes = [
        Regime(epochs=4, batch=16, lr=0.1, warmup=3),
        Regime(epochs=2, batch=16, lr=0.05),
        Regime(epochs=9, batch=16, stop_after=1),
    ]

    def build(seed):
        tasks = toy_tasks(2, seed=seed, train=(60, 200, 90)[seed])
        return make("hat", tasks, seed=seed), tasks, Trainer(regimes[seed], seed=seed, engine="eager")

    assert_close(*alone_and_stacked(build))


def test_other_classes_and_methods_have_stacks_of_their_own():
    """Three forms at a time, in five runs of which four are under way."""

    def build(seed):
        tasks = toy_tasks(2, classes=3 + seed % 2, seed=seed)
        name = "ewc" if seed == 3 else "hat"
        return make(name, tasks, seed=seed), tasks, Trainer(REGIME, seed=seed, engine="eager")

    assert_close(*alone_and_stacked(build, seeds=range(5), workers=4))


def test_compiled():
    def build(seed):
        method, tasks, _ = maker("hat")(seed)
        return method, tasks, Trainer(REGIME, seed=seed, engine="compiled")

    alone = [Learned(maker("hat"), seed) for seed in range(2)]
    stacked = run_interleaved([lambda s=s: Learned(build, s) for s in range(2)], torch.device("cpu"), 2, stack=True)
    assert {engine for run in stacked for engine in run.engines} == {"compiled, stacked"}
    assert_close(alone, stacked, 1e-3)


class Odd(Method):
    """Its step has an operation that can't be stacked: it draws numbers by probabilities that are values."""

    def loss(self, batch):
        logits = self(batch.x, batch.task)
        kept = torch.bernoulli(torch.sigmoid(logits.detach()))
        return batch.loss(logits * kept)


def test_what_cant_be_stacked_says_so_and_runs_side_by_side():
    """Beside runs that are stacked: neither waits for the other forever."""

    def build(seed):
        method, tasks, fit = maker("sgd")(seed)
        return (Odd(make("sgd", tasks, seed=seed).net) if seed == 1 else method), tasks, fit

    with pytest.warns(UserWarning, match="bernoulli"):
        alone, stacked = alone_and_stacked(build)
    assert [run.engines for run in stacked] == [{"eager, stacked"}, {"eager"}, {"eager, stacked"}]
    assert torch.equal(torch.tensor(alone[1].losses), torch.tensor(stacked[1].losses))
    assert_close(alone[::2], stacked[::2])


def test_a_run_that_fails_ends_all():
    class Broken(HAT):
        def learn_task(self, task, fit):
            if task.index == 1:
                raise RuntimeError("broken")
            super().learn_task(task, fit)

    def build(seed):
        method, tasks, fit = maker("hat")(seed)
        return (Broken(make("sgd", tasks, seed=seed).net) if seed == 1 else method), tasks, fit

    runs = [lambda seed=seed: Learned(build, seed) for seed in range(3)]
    with pytest.raises(RuntimeError, match="broken"):
        run_interleaved(runs, torch.device("cpu"), 3, stack=True)


def test_memory_is_a_runs_own_again_after_its_fit():
    """Nothing of a method lies in the memory of a stack, which others use."""
    runs = run_interleaved([lambda s=s: Learned(maker("hat"), s) for s in range(2)], torch.device("cpu"), 2, stack=True)
    for run in runs:
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in run.method.state_dict().values())
