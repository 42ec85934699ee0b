"""Runs that are stacked give the results of each alone, to rounding, and forget nothing."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from hatrack import HAT, Method, Network, Regime, Trainer
from hatrack.engine import decompositions, stacked_decompositions, stacked_form, stacked_graph
from hatrack.engine.interleaving import run_interleaved
from hatrack.engine.precision import cpu_computes_bfloat16
from hatrack.seeds import seeded
from tests.helpers.learning import OPTIMIZERS, make
from tests.helpers.pictures import convolutional, pictures
from tests.helpers.stacking import Learned, alone_and_stacked, assert_close
from tests.helpers.tiers import QUICK, quick_and_slow
from tests.helpers.toys import toy_tasks

REGIME = Regime(epochs=3, batch=16, lr=0.1)
STACKED = ["sgd", "hat", "ewc", "si", "mas", "packnet", "pmask", "stable-sgd", "lwf", "er", "agem", "frozen", "independent"]


def maker(name, regime=REGIME, count=2, **how):
    def build(seed):
        tasks = toy_tasks(count, seed=seed, **how)
        return make(name, tasks, seed=seed), tasks, Trainer(regime, seed=seed, engine="eager")

    return build


@cache
def learned(name):
    """Three runs of a method, each alone, and stacked."""
    return alone_and_stacked(maker(name))


@pytest.mark.parametrize("name", quick_and_slow(STACKED, QUICK))
def test_stacked_runs_learn_what_each_learns_alone(name):
    """With dropout, of which every run draws its own numbers, and a last batch that is smaller."""
    assert_close(*learned(name))


@pytest.mark.parametrize("name", ["ewc", "imm-mean", "mas", "agem"])
def test_a_stack_has_no_batched_products_of_single_numbers(name, monkeypatch):
    """A GPU computes each of them, such as the energy of a penalty on all weights, with few threads."""
    monkeypatch.setattr(stacked_form, "_forms", {})
    alone_and_stacked(maker(name, Regime(epochs=1, batch=16)), seeds=(0, 1))
    products = [
        node.meta["val"].shape
        for form in stacked_form._forms.values()
        for node in form.code.graph.nodes
        if node.target is torch.ops.aten.bmm.default
    ]
    assert products
    assert all(shape[1:].numel() > 1 for shape in products)


def test_another_seed_would_be_seen():
    """The control: runs of other seeds are not close."""
    alone, stacked = learned("hat")
    with pytest.raises(AssertionError):
        assert_close(alone, stacked[::-1])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["kept momentum", "kept adam"])
def test_heads_that_are_packed_follow_the_stack(optimizer):
    """What an optimizer keeps of them goes on to the next task, when another run has their lane."""
    assert_close(*alone_and_stacked(maker("er", Regime(epochs=2, batch=16, **OPTIMIZERS[optimizer]), 3), seeds=(0, 1)))


@pytest.mark.parametrize("optimizer", quick_and_slow(OPTIMIZERS, ["kept adamw with decay"]))
def test_every_optimizer_is_stacked(optimizer):
    assert_close(*alone_and_stacked(maker("hat", Regime(epochs=2, batch=16, **OPTIMIZERS[optimizer])), seeds=(0, 1)))


@pytest.mark.parametrize("name", quick_and_slow(["hat", "pmask", "packnet"], ["hat"]))
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


@pytest.mark.slow
def test_convolutions_norms_and_pooling():
    """Also with the layouts of a GPU."""

    def build(seed):
        tasks = pictures(2)
        method = convolutional(tasks)
        return method, tasks, Trainer(REGIME, seed=seed, engine="eager")

    alone, stacked = alone_and_stacked(build, seeds=(0, 1))
    assert_close(alone, stacked)
    assert not any(run.forgets() for run in stacked)


class Branches(nn.Module):
    """Two convolutions of each kind, side by side."""

    def __init__(self, kinds) -> None:
        super().__init__()
        self.branches, self.last = nn.ModuleList(), nn.Linear(24 * len(kinds), 8)
        for kernel, stride, padding, bias in kinds:
            first = nn.Conv2d(2, 4, kernel, stride, padding, bias=bias)
            second = nn.Conv2d(4, 6, kernel, stride, kernel, bias=bias)
            self.branches.append(nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()))

    def forward(self, x):
        return self.last(torch.cat([branch(x) for branch in self.branches], 1))


KINDS = [(3, 1, 1, True), (3, 2, 1, False), (4, 3, 0, True), (1, 1, 0, True)]  # kernel, stride, padding, bias


@pytest.mark.parametrize("rows", [1, 3, 16, 17, 48])
def test_long_sums_of_products_are_divided(rows, monkeypatch):
    """Into parts of whole images: of 16 images with 3 positions each, at most so many rows in a part if that is possible."""
    monkeypatch.setattr(stacked_decompositions, "LONG", rows)
    draw = torch.Generator().manual_seed(0)
    left, right = (torch.randn(48, size, dtype=torch.float64, generator=draw) for size in (5, 7))
    parts = []
    monkeypatch.setattr(torch, "bmm", lambda one, two, bmm=torch.bmm: parts.append(one.shape[2]) or bmm(one, two))
    wanted = sum(left[row][:, None] * right[row] for row in range(48))
    torch.testing.assert_close(stacked_decompositions.sum_of_products(left, right, 16), wanted)
    assert parts == {1: [3], 3: [3], 16: [12], 17: [12], 48: []}[rows]


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("kinds", [KINDS, *(pytest.param([kind], marks=pytest.mark.slow) for kind in KINDS)])
def test_every_plain_convolution(gpu, kinds, monkeypatch):
    monkeypatch.setattr(decompositions, "on_gpu", lambda x: gpu)
    monkeypatch.setattr(stacked_decompositions, "LONG", 100)  # of up to 16 * 81 positions

    def build(seed):
        tasks = toy_tasks(1, shape=(2, 9, 9), seed=seed)
        with seeded(seed, "weights"):
            trunk = Branches(kinds)
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


@pytest.mark.slow
def test_other_classes_and_methods_have_stacks_of_their_own():
    """Three forms at a time, in five runs of which four are under way."""

    def build(seed):
        tasks = toy_tasks(2, classes=3 + seed % 2, seed=seed)
        name = "ewc" if seed == 3 else "hat"
        return make(name, tasks, seed=seed), tasks, Trainer(REGIME, seed=seed, engine="eager")

    assert_close(*alone_and_stacked(build, seeds=range(5), workers=4))


def run_forms(build, seeds):
    """The runs stacked, and how many forms of steps they had."""
    stacked_form._forms.clear()
    runs = run_interleaved([lambda s=s: Learned(build, s) for s in seeds], torch.device("cpu"), len(seeds), stack=True)
    return runs, len(stacked_form._forms)


@pytest.mark.parametrize("optimizer", quick_and_slow(["momentum", "adamw", "sgd"], ["momentum"]))
def test_tasks_with_other_classes_share_a_stack(optimizer):
    """At the same time one run learns three classes and another one five; their heads have room for five."""
    how = {"momentum": {"lr": 0.05, "weight_decay": 0.01}, "adamw": {"lr": 0.01, "weight_decay": 0.1}, "sgd": {"lr": 0.1}}
    regime = Regime(epochs=3, batch=16, optimizer=optimizer, **how[optimizer])

    def build(seed):
        tasks = [toy_tasks(2, classes=(3, 5)[(k + seed) % 2], seed=seed)[k] for k in range(2)]
        return make("hat", tasks, seed=seed), tasks, Trainer(regime, seed=seed, engine="eager")

    stacked, forms = run_forms(build, (0, 1))
    assert_close([Learned(build, seed) for seed in (0, 1)], stacked)
    assert not any(run.forgets() for run in stacked)
    assert forms == 1
    assert [len(head.weight) for head in stacked[1].method.net.heads] == [5, 3]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["joint", "er", "derpp"])
def test_methods_that_use_several_heads_with_other_classes(name):
    """All rows of a head with more rows than outputs count, not as many as it has outputs: 16 times 5 logits would also be
    20 times 4."""
    regime = Regime(epochs=2, batch=16, optimizer="adam", lr=0.01, keep_state=True)

    def build(seed):
        tasks = [toy_tasks(2, classes=(4, 5)[(k + seed) % 2], seed=seed)[k] for k in range(2)]
        return make(name, tasks, seed=seed), tasks, Trainer(regime, seed=seed, engine="eager")

    assert_close(*alone_and_stacked(build, seeds=(0, 1)))


@pytest.mark.slow
def test_a_step_that_needs_a_head_as_it_is_has_a_stack_of_its_own():
    class Exact(Method):
        def loss(self, batch):
            logits = self(batch.x, batch.task)
            return batch.loss(logits) + logits.add(torch.ones(self.net.classes[batch.task])).square().mean()

    def build(seed):
        tasks = [toy_tasks(2, classes=(3, 5)[(k + seed) % 2], seed=seed)[k] for k in range(2)]
        return Exact(make("sgd", tasks, seed=seed).net), tasks, Trainer(REGIME, seed=seed, engine="eager")

    stacked, forms = run_forms(build, (0, 1))
    assert_close([Learned(build, seed) for seed in (0, 1)], stacked)
    assert forms == 2


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["momentum", "sgd"])
def test_weight_decay_makes_no_class_likely(optimizer):
    """It brings the biases of classes that a task does not have near 0; with momentum they would overshoot."""
    how = {"momentum": {"lr": 0.1, "weight_decay": 0.05}, "sgd": {"lr": 0.1, "weight_decay": 5}}
    regime = Regime(epochs=40, batch=16, optimizer=optimizer, schedule="constant", restore=False, **how[optimizer])

    def build(seed):
        tasks = [toy_tasks(2, classes=(3, 5)[(k + seed) % 2], seed=seed)[k] for k in range(2)]
        return make("sgd", tasks, seed=seed), tasks, Trainer(regime, seed=seed, engine="eager")

    assert_close(*alone_and_stacked(build, seeds=(0, 1)))


@pytest.mark.slow
def test_a_lane_without_a_run_asks_for_no_image_of_its_last_run():
    """A run learns a large task and a small one, and ends; its lane goes on beside a run that has few images."""

    def build(seed):
        tasks = [toy_tasks(2, seed=seed, train=size)[k] for k, size in enumerate(((400, 40), (60, 60))[seed])]
        regime = Regime(epochs=(1, 20)[seed], batch=16, lr=0.1, schedule="constant")
        return make("sgd", tasks, seed=seed), tasks, Trainer(regime, seed=seed, engine="eager")

    assert_close(*alone_and_stacked(build, seeds=(0, 1)))


def test_other_targets_keep_their_classes():
    """The mean of all log-probabilities, which smoothed labels need, would be minus infinity."""
    regime = Regime(epochs=2, batch=16, lr=0.1, smoothing=0.1)

    def build(seed):
        tasks = [toy_tasks(2, classes=(3, 5)[(k + seed) % 2], seed=seed)[k] for k in range(2)]
        return make("sgd", tasks, seed=seed), tasks, Trainer(regime, seed=seed, engine="eager")

    stacked, forms = run_forms(build, (0, 1))
    assert_close([Learned(build, seed) for seed in (0, 1)], stacked)
    assert forms == 2


@pytest.mark.slow
def test_moved_pixels_make_no_other_form():
    """Tasks whose pixels are permuted, and tasks whose pixels are not."""

    def build(seed):
        tasks = toy_tasks(2, seed=seed)
        if seed:
            order = torch.randperm(tasks[0].train.transform.mean.new_zeros(tasks[0].train.x[0].shape).numel())[None]
            tasks = [replace(t, **{k: moved(getattr(t, k), order) for k in ("train", "valid", "test")}) for t in tasks]
        return make("sgd", tasks, seed=seed), tasks, Trainer(REGIME, seed=seed, engine="eager")

    def moved(split, order):
        return replace(split, transform=replace(split.transform, pixels=order))

    torch.manual_seed(0)
    stacked, forms = run_forms(build, (0, 1))
    torch.manual_seed(0)
    assert_close([Learned(build, seed) for seed in (0, 1)], stacked)
    assert forms == 1


@pytest.mark.slow
def test_copies_in_fewer_bits_are_kept(monkeypatch):
    """With bfloat16 weights are copied once per update, in the stacked step, and after every change from outside."""
    if not cpu_computes_bfloat16():
        pytest.skip("this processor can't compute in bfloat16")
    monkeypatch.setattr(stacked_graph, "MANY", 2)

    def learned(seed):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return Learned(maker("hat"), seed)

    stacked_form._forms.clear()
    alone = [learned(seed) for seed in (0, 1)]
    stacked = run_interleaved([lambda s=s: learned(s) for s in (0, 1)], torch.device("cpu"), 2, stack=True)
    assert any(form.casts for form in stacked_form._forms.values())
    assert_close(alone, stacked, 2e-2)


@pytest.mark.slow
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


@pytest.mark.slow
def test_memory_is_a_runs_own_again_after_its_fit():
    """Nothing of a method lies in the memory of a stack, which others use."""
    runs = run_interleaved([lambda s=s: Learned(maker("hat"), s) for s in range(2)], torch.device("cpu"), 2, stack=True)
    for run in runs:
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in run.method.state_dict().values())
