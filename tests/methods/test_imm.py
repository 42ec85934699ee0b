"""IMM-mean and IMM-mode: the pull while a task is learned, and the merge after it, against plain loops in float64."""

import pytest
import torch
from torch import nn

from hatrack import METHODS, Method, Network, Regime, Trainer, evaluate
from hatrack.methods.parts.vectors import grads, set_values, values
from hatrack.networks.mlp import mlp
from hatrack.seeds import seeded
from tests.helpers.learning import learn, logits
from tests.helpers.loops import loop
from tests.helpers.toys import toy_tasks

BOTH = pytest.mark.parametrize("kind", ["imm-mean", "imm-mode"])


def make(tasks, kind, *, trunk=None, known=None, heads="multi", **options) -> Method:
    with seeded(0, "weights"):
        trunk = trunk or mlp(tasks[0].shape, widths=(12,), dropout=0.0, input_dropout=0.0)
    example = tasks[0].train.inputs(torch.arange(2))
    return METHODS[kind](Network(trunk, [t.classes for t in tasks[:known]], example, heads=heads), **options)


# Merges by hand: made-up weights after each task


def made_up(method: Method, count: int) -> list[list[torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [
        [torch.randn(p.shape, generator=draw, dtype=torch.float64) for p in method.net.shared_parameters()]
        for _ in range(count)
    ]


def put(method: Method, weights: list[torch.Tensor]) -> None:
    for parameter, value in zip(method.net.shared_parameters(), weights, strict=True):
        parameter.data.copy_(value)


@pytest.mark.parametrize("heads", ["multi", "shared"])
def test_the_mean_is_over_all_tasks(heads):
    method = make(toy_tasks(1), "imm-mean", heads=heads).double()
    tasks = made_up(method, 4)
    for number, weights in enumerate(tasks):
        put(method, weights)
        method.merge()
        for k, parameter in enumerate(method.net.shared_parameters()):
            expected = torch.zeros_like(parameter)
            for earlier in tasks[: number + 1]:
                expected += earlier[k] / (number + 1)
            torch.testing.assert_close(parameter.data, expected, rtol=1e-12, atol=1e-12)
        assert torch.equal(method.anchor, values(method.net.shared_parameters()))


def test_alpha_is_the_share_of_the_new_task():
    method = make(toy_tasks(1), "imm-mean", alpha=0.3).double()
    tasks = made_up(method, 3)
    for weights in tasks:
        put(method, weights)
        method.merge()
    for k, parameter in enumerate(method.net.shared_parameters()):
        expected = 0.7 * (0.7 * tasks[0][k] + 0.3 * tasks[1][k]) + 0.3 * tasks[2][k]
        torch.testing.assert_close(parameter.data, expected, rtol=1e-12, atol=1e-12)


def test_the_mode_weighs_by_fisher_information():
    """Every weight: sum_k F_k theta_k / sum_k F_k; the newest value where no task cares."""
    method = make(toy_tasks(1), "imm-mode").double()
    tasks, size = made_up(method, 3), len(method.anchor)
    draw = torch.Generator().manual_seed(1)
    fishers = [torch.rand(size, generator=draw, dtype=torch.float64) for _ in tasks]
    for k, fisher in enumerate(fishers):
        fisher[: 10 * (k + 1)] = 0  # the first ten for all tasks, others for some
    for weights, fisher in zip(tasks, fishers, strict=True):
        put(method, weights)
        method.merge(fisher)
        method.anchor.copy_(values(method.net.shared_parameters()).detach())
    flat = [torch.cat([w.reshape(-1) for w in weights]) for weights in tasks]
    merged = values(method.net.shared_parameters())
    for i in range(size):
        total = sum(fisher[i] for fisher in fishers)
        expected = sum(f[i] * w[i] for f, w in zip(fishers, flat, strict=True)) / total if total else flat[-1][i]
        assert merged[i].item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(method.fisher, sum(fishers))


# Merges in learning


@pytest.mark.parametrize("heads", ["multi", "shared"])
@BOTH
def test_learning_merges_what_tasks_share(kind, heads):
    tasks = toy_tasks(2)
    method, plain = make(tasks, kind, heads=heads), make(tasks, "imm-mode", heads=heads, merge="none")
    plain.strength = method.strength
    fits = [Trainer(Regime(epochs=3, batch=16, lr=0.1)) for _ in range(2)]
    for one, fit in zip((method, plain), fits, strict=True):
        one.learn(tasks[0], fit)
    assert torch.equal(values(method.net.shared_parameters()), values(plain.net.shared_parameters())), (
        "after one task there is nothing to merge"
    )
    before = values(method.net.shared_parameters()).detach()
    first = loop(plain, tasks[0].train, 0, plain.net.shared_parameters())
    for one, fit in zip((method, plain), fits, strict=True):
        one.learn(tasks[1], fit)
    now = values(plain.net.shared_parameters()).detach()  # as trained
    if kind == "imm-mean":
        expected = (before + now) / 2
    else:
        second = loop(plain, tasks[1].train, 1, plain.net.shared_parameters())
        expected = torch.where(first + second > 0, (first * before + second * now) / (first + second), now)
    assert (now - before).norm() > 0.1
    torch.testing.assert_close(values(method.net.shared_parameters()).detach(), expected, rtol=1e-3, atol=1e-5)
    assert torch.equal(method.anchor, values(method.net.shared_parameters()))
    if heads == "multi":
        for ours, trained in zip(method.net.heads.parameters(), plain.net.heads.parameters(), strict=True):
            assert torch.equal(ours, trained), "heads of single tasks are not merged"


@BOTH
def test_norms_keep_the_statistics_of_the_last_task(kind):
    tasks = toy_tasks(2)
    method, plain = (
        make(tasks, kind, trunk=nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU()), **options)
        for kind, options in ((kind, {}), ("imm-mode", {"merge": "none"}))
    )
    plain.strength = method.strength
    plain.net.load_state_dict(method.net.state_dict())
    for one in (method, plain):
        learn(one, tasks)
    assert torch.equal(method.net.trunk[2].running_mean, plain.net.trunk[2].running_mean)
    assert not torch.equal(method.net.trunk[2].weight, plain.net.trunk[2].weight)


@BOTH
def test_the_first_task_is_plain_sgd(kind):
    tasks = toy_tasks(2)
    method, sgd = make(tasks, kind), make(tasks, "sgd")
    for one in (method, sgd):
        learn(one, tasks[:1])
    assert torch.equal(logits(method, tasks[0]), logits(sgd, tasks[0]))


@BOTH
def test_the_pull_is_l2_towards_the_merged_weights(kind):
    tasks = toy_tasks(1)
    method = make(tasks, kind, strength=3.0)
    set_values(method.net.shared_parameters(), method.anchor + 1)
    assert method.penalty().item() == 0, "nothing pulls in the first task"
    learn(method, tasks)
    target = method.anchor.clone()
    assert torch.equal(target, values(method.net.shared_parameters()))
    shift = torch.linspace(-1, 1, len(target))
    set_values(method.net.shared_parameters(), target + shift)
    penalty = method.penalty()
    penalty.backward()
    assert penalty.item() == pytest.approx(3 / 2 * (shift**2).sum().item(), rel=1e-4)
    torch.testing.assert_close(grads(method.net.shared_parameters()), 3 * shift, rtol=1e-4, atol=1e-5)


@BOTH
def test_it_forgets_less_than_sgd(kind):
    """With a shared head, so that the tasks are in each other's way."""
    tasks = toy_tasks(4, noise=0.5)
    loss = {}
    for name in ("sgd", kind):
        method = make(tasks, name, heads="shared")
        learn(method, tasks, Trainer(Regime(epochs=8, batch=16, lr=0.1, restore=False)))
        loss[name] = sum(evaluate(method, task.test).loss for task in tasks[:2])
    assert loss[kind] < 0.6 * loss["sgd"]


def test_without_a_merge_it_is_l2_transfer():
    """What the HAT authors' code does: the weights stay as trained, and no Fisher is measured."""
    tasks = toy_tasks(3)
    method, sgd = make(tasks, "imm-mode", merge="none", strength=0.0), make(tasks, "sgd")
    for one in (method, sgd):
        learn(one, tasks)
    assert not method.fisher.any()
    torch.testing.assert_close(logits(method, tasks[0]), logits(sgd, tasks[0]))


def test_options_are_checked():
    tasks = toy_tasks(1)
    with pytest.raises(ValueError, match="alpha must be at most 1"):
        make(tasks, "imm-mean", alpha=1.5)
    with pytest.raises(ValueError, match="merge must be one of 'mode', 'none'"):
        make(tasks, "imm-mode", merge="mean")
