"""EWC against its formulas: springs that add up, what every kind of anchor remembers, and what it is good for."""

import statistics
import time
from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hatrack import METHODS, Method, Network, Regime, Trainer, evaluate
from hatrack.methods.ewc import EWC
from hatrack.methods.parts.vectors import grads, set_values, values
from hatrack.networks.mlp import mlp
from hatrack.seeds import seeded
from tests.helpers.learning import learn, logits
from tests.helpers.loops import loop
from tests.helpers.toys import toy_tasks


def make(tasks, kind="ewc", *, widths=(12,), known=None, heads="multi", freeze="", **options) -> Method:
    with seeded(0, "weights"):
        trunk = mlp(tasks[0].shape, widths=widths, dropout=0.0, input_dropout=0.0)
    example = tasks[0].train.inputs(torch.arange(2))
    return METHODS[kind](Network(trunk, [t.classes for t in tasks[:known]], example, heads=heads, freeze=freeze), **options)


def history(ewc: EWC, tasks: int) -> tuple[list[Tensor], list[Tensor]]:
    """Fishers (with zeros, some of them for all tasks) and weights of made-up tasks, which the method then consolidates."""
    draw = torch.Generator().manual_seed(0)
    size = len(ewc.anchor)
    fishers, anchors = [], []
    for _ in range(tasks):
        some = torch.rand(size, generator=draw, dtype=torch.float64) > 0.3
        some[: size // 8] = False
        fishers.append(torch.rand(size, generator=draw, dtype=torch.float64) * some)
        anchors.append(torch.randn(size, generator=draw, dtype=torch.float64))
        set_values(ewc.net.shared_parameters(), anchors[-1])
        ewc.consolidate(fishers[-1])
    return fishers, anchors


def test_springs_to_all_tasks_are_one_spring():
    """The gradient is that of the sum over tasks, and the value differs by a constant: the sum at the common anchor."""
    ewc = make(toy_tasks(1), strength=7.0, limit=0.0).double()
    fishers, anchors = history(ewc, 6)

    def sum_over_tasks(theta: Tensor) -> Tensor:
        return 7.0 / 2 * sum((f * (theta - a) ** 2).sum() for f, a in zip(fishers, anchors, strict=True))

    constant = sum_over_tasks(ewc.anchor).item()
    assert constant > 1
    for seed in range(3):
        theta = torch.randn(len(ewc.anchor), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        theta.requires_grad_()
        expected = sum_over_tasks(theta)
        (slope,) = torch.autograd.grad(expected, theta)
        set_values(ewc.net.shared_parameters(), theta.detach())
        ewc.zero_grad()
        ewc.penalty().backward()
        torch.testing.assert_close(grads(ewc.net.shared_parameters()), slope, rtol=1e-10, atol=1e-10)
        assert ewc.penalty().item() + constant == pytest.approx(expected.item(), rel=1e-10)


def test_the_closed_form_of_002_lacks_a_factor_two():
    """As printed it differs from the sum over tasks; with the cross term doubled it is the sum."""
    draw = torch.Generator().manual_seed(0)
    fishers = torch.rand(4, 50, generator=draw, dtype=torch.float64)
    anchors, theta = (torch.randn(n, 50, generator=draw, dtype=torch.float64) for n in (4, 1))
    direct = (fishers * (theta - anchors) ** 2).sum()
    first, second, third = fishers.sum(0), (fishers * anchors).sum(0), (fishers * anchors**2).sum()
    printed = (theta**2 * first - theta * second).sum() + third
    doubled = (theta**2 * first - 2 * theta * second).sum() + third
    assert abs(printed - direct) > 1
    assert doubled.item() == pytest.approx(direct.item())


def test_anchors_last_mean_and_online_by_hand():
    expected = {
        "last": lambda f: f[2],
        "mean": lambda f: (f[0] + f[1] + f[2]) / 3,
        "online": lambda f: 0.25 * f[0] + 0.5 * f[1] + f[2],
    }
    for anchors, stiffness in expected.items():
        ewc = make(toy_tasks(1), anchors=anchors, decay=0.5, strength=3.0, limit=0.0).double()
        fishers, positions = history(ewc, 3)
        torch.testing.assert_close(ewc.fisher, stiffness(fishers))
        assert torch.equal(ewc.anchor, positions[-1])
        assert ewc.penalty().item() == 0
        set_values(ewc.net.shared_parameters(), positions[0])
        by_hand = 3 / 2 * (stiffness(fishers) * (positions[0] - positions[-1]) ** 2).sum()
        assert ewc.penalty().item() == pytest.approx(by_hand.item())


@pytest.mark.parametrize("heads", ["multi", "shared"])
def test_the_fisher_is_that_of_the_task_just_learned(heads):
    tasks = toy_tasks(2)
    ewc = make(tasks, heads=heads)
    fit = Trainer(Regime(epochs=3, batch=16, lr=0.1))
    ewc.learn(tasks[0], fit)
    weights = ewc.net.shared_parameters()
    assert len(weights) == (4 if heads == "shared" else 2)
    first, at_first = loop(ewc, tasks[0].train, 0, weights), values(weights).detach()
    torch.testing.assert_close(ewc.fisher, first, rtol=1e-4, atol=1e-9)
    assert torch.equal(ewc.anchor, at_first)
    ewc.learn(tasks[1], fit)
    second, at_second = loop(ewc, tasks[1].train, 1, weights), values(weights).detach()
    torch.testing.assert_close(ewc.fisher, first + second, rtol=1e-4, atol=1e-9)
    mean = torch.where(first + second > 0, (first * at_first + second * at_second) / (first + second), at_second)
    torch.testing.assert_close(ewc.anchor, mean, rtol=1e-3, atol=1e-4)


def test_importance_ones_is_plain_l2():
    tasks = toy_tasks(2)
    ewc = make(tasks, importance="ones", anchors="last", strength=0.5)
    learn(ewc, tasks[:1])
    assert torch.equal(ewc.fisher, torch.ones_like(ewc.fisher))
    set_values(ewc.net.shared_parameters(), ewc.anchor + 2)
    assert ewc.penalty().item() == pytest.approx(0.5 / 2 * 4 * len(ewc.anchor))


def test_rescale_scales_to_the_unit_range():
    tasks = toy_tasks(1)
    plain, scaled = (make(tasks, rescale=n) for n in (False, True))
    for ewc in (plain, scaled):
        learn(ewc, tasks)
    low, high = plain.fisher.min(), plain.fisher.max()
    assert high < 1
    torch.testing.assert_close(scaled.fisher, (plain.fisher - low) / (high - low))
    assert scaled.fisher.min() == 0
    assert scaled.fisher.max() == 1


def test_samples_and_estimators_reach_the_fisher():
    tasks = toy_tasks(1)
    options = [{}, {"samples": 10}, {"estimator": "batches"}, {"estimator": "expected"}, {"samples": 10_000}]
    found = []
    for option in options:
        ewc = make(tasks, **option)
        learn(ewc, tasks)
        found.append(ewc.fisher)
    assert torch.equal(found[0], found[4])
    assert len({f.sum().item() for f in found}) == 4
    assert found[2].sum() < found[0].sum() / 2, "squares of means are smaller than means of squares"


def test_the_first_task_is_plain_sgd():
    tasks = toy_tasks(2)
    ewc, sgd = make(tasks), make(tasks, "sgd")
    for method in (ewc, sgd):
        learn(method, tasks[:1])
    assert torch.equal(logits(ewc, tasks[0]), logits(sgd, tasks[0]))


def test_without_strength_it_is_plain_sgd():
    tasks = toy_tasks(3)
    ewc, sgd = make(tasks, strength=0.0), make(tasks, "sgd")
    for method in (ewc, sgd):
        learn(method, tasks)
    for task in tasks:
        torch.testing.assert_close(logits(ewc, task), logits(sgd, task))


@pytest.mark.parametrize("anchors", ["all", "last", "mean", "online"])
def test_it_forgets_less_than_sgd(anchors):
    """With a shared head, so that the tasks are in each other's way."""
    tasks = toy_tasks(4, noise=0.5)
    loss = {}
    for name, options in (("sgd", {}), ("ewc", {"anchors": anchors})):
        method = make(tasks, name, heads="shared", **options)
        learn(method, tasks, Trainer(Regime(epochs=8, batch=16, lr=0.1, restore=False)))
        loss[name] = sum(evaluate(method, task.test).loss for task in tasks[:2])
    assert loss["ewc"] < 0.6 * loss["sgd"]


def test_no_spring_is_stiffer_than_the_limit():
    """SGD overshoots a spring that is stiffer than 2 / lr more and more; one of 1 / lr is back in a single step."""
    tasks = toy_tasks(1)
    for limit, within in ((0.0, 40.0), (7.0, 7.0)):
        ewc = make(tasks, strength=100.0, limit=limit, importance="ones").double()
        ewc.fisher.copy_(torch.linspace(0, 0.4, len(ewc.fisher)))
        set_values(ewc.net.shared_parameters(), ewc.anchor + 0.5)
        ewc.penalty().backward()
        stiffness = torch.linspace(0, 40, len(ewc.fisher), dtype=torch.float64).clamp(max=within)
        torch.testing.assert_close(grads(ewc.net.shared_parameters()), stiffness * 0.5, rtol=1e-5, atol=1e-6)
        assert ewc.penalty().item() == pytest.approx((stiffness * 0.125).sum().item(), rel=1e-5)


def test_heads_of_other_tasks_do_not_move():
    tasks = toy_tasks(2)
    ewc = make(tasks)
    fit = learn(ewc, tasks[:1], Trainer(Regime(epochs=3, batch=16, optimizer="adamw", lr=0.01, weight_decay=0.1)))
    before = [p.clone() for p in ewc.net.heads[0].parameters()]
    learn(ewc, tasks[1:], fit)
    assert all(torch.equal(a, b) for a, b in zip(before, ewc.net.heads[0].parameters(), strict=True))


def test_frozen_parts_have_no_springs():
    tasks = toy_tasks(2)
    ewc = make(tasks, widths=(12, 10), freeze="1")
    assert len(ewc.fisher) == 12 * 10 + 10
    learn(ewc, tasks)
    learn(make(tasks, widths=(12, 10), freeze="*", rescale=True), tasks)


def test_options_are_checked():
    tasks = toy_tasks(1)
    with pytest.raises(ValueError, match="strength must be at least 0"):
        make(tasks, strength=-1.0)
    with pytest.raises(ValueError, match="anchors must be one of 'all', 'last', 'mean', 'online'"):
        make(tasks, anchors="first")


# A step costs the same, however many tasks there were


class Operations(TorchDispatchMode):
    """Counts operations by name and by the sizes that they work on."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        sizes = tuple(tuple(a.shape) for a in args if isinstance(a, Tensor))
        self.counts[str(func), sizes] += 1
        return func(*args, **(kwargs or {}))


def make_step(ewc, task):
    """One real step on the first 64 images."""
    course = Trainer(Regime(batch=64)).start(ewc, task)
    ewc.train()
    index, number = torch.arange(64), torch.tensor(0)
    return lambda: course.step(index, number)


def test_a_step_does_as_much_in_task_20_as_in_task_2():
    tasks = toy_tasks(20, train=64, valid=0.0)
    ewc = make(tasks, widths=(10,), heads="shared")
    fit = Trainer(Regime(epochs=1, batch=64))
    counts, remembered = {}, {}
    for task in tasks:
        if task.index in (1, 19):
            step = make_step(ewc, task)
            with Operations() as operations:
                step()
            counts[task.index] = operations.counts
            remembered[task.index] = sum(buffer.numel() for buffer in ewc.buffers())
        ewc.learn(task, fit)
    assert counts[1] == counts[19]
    assert counts[1].total() > 20
    assert remembered[1] == remembered[19]


@pytest.mark.slow
def test_a_step_takes_as_long_in_task_20_as_in_task_2():
    tasks = toy_tasks(20, classes=10, shape=(1, 28, 28), train=64, test=10, valid=0.0)
    steps = {}
    for count in (1, 19):
        ewc = make(tasks, widths=(100, 100), heads="shared")
        learn(ewc, tasks[:count], Trainer(Regime(epochs=1, batch=64)))
        steps[count] = make_step(ewc, tasks[count])
    seconds = {count: [] for count in steps}
    for _ in range(500):
        for count, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[count].append(time.perf_counter() - start)
    assert statistics.median(seconds[19]) <= 1.15 * statistics.median(seconds[1])


def test_the_penalty_is_in_the_loss():
    tasks = toy_tasks(2)
    ewc = make(tasks, limit=0.0)
    learn(ewc, tasks, Trainer(Regime(epochs=4, batch=16, lr=0.01)))
    batch = tasks[1].train.take(torch.arange(16), torch.tensor(0), torch.tensor(1), 16)
    plain = F.cross_entropy(ewc(batch.x, 1), batch.y)
    set_values(ewc.net.shared_parameters(), ewc.anchor + 0.1)
    shifted = F.cross_entropy(ewc(batch.x, 1), batch.y)
    assert ewc.loss(batch).item() == pytest.approx((shifted + 200 / 2 * 0.01 * ewc.fisher.sum()).item(), rel=1e-4)
    assert shifted != plain
