"""Packed heads: logits and gradients against a plain loop, and that a head is a part of what is trained."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hatrack import ER, METHODS, Regime, Trainer
from hatrack.networks.packed_heads import FEW, PackedHeads
from hatrack.training import fit_loop
from tests.helpers.learning import OPTIMIZERS, FunctionFit, learn, logits, make
from tests.helpers.toys import toy_tasks

LOW = torch.finfo(torch.float64).min
MIXING = ["er", "agem", "derpp", "joint"]


def heads_of(sizes):
    torch.manual_seed(0)
    return {2 * k: nn.Linear(6, size, dtype=torch.float64) for k, size in enumerate(sizes)}  # of tasks 0, 2, 4, ...


@pytest.mark.parametrize("sizes", [[3, 5, 2], [4] * 7, [1], [2, 3] * FEW], ids=len)
def test_every_example_has_the_logits_and_gradients_of_its_own_head(sizes):
    heads, x = heads_of(sizes), torch.randn(90, 6, dtype=torch.float64, requires_grad=True)
    before = {task: [p.detach().clone() for p in head.parameters()] for task, head in heads.items()}
    packed, task, y = PackedHeads(heads), 2 * (torch.arange(90) % len(sizes)), torch.zeros(90, dtype=torch.int64)
    found = packed(x, task)
    slopes = torch.autograd.grad(F.cross_entropy(found, y), [packed.weight, packed.bias, x])
    plain = {k: [p.requires_grad_() for p in both] for k, both in before.items()}
    rows = [F.linear(x[i], *plain[k]) for i, k in enumerate(task.tolist())]
    for row, expected in zip(found, rows, strict=True):
        torch.testing.assert_close(row[: len(expected)], expected)
        assert (row[len(expected) :] == LOW).all()
    loss = sum(F.cross_entropy(row[None], y[:1]) for row in rows) / 90
    expected = torch.autograd.grad(loss, [x, *(p for both in plain.values() for p in both)])
    torch.testing.assert_close(slopes[2], expected[0])
    for number, size in enumerate(sizes):
        for whole, own in zip(slopes[:2], expected[1 + 2 * number : 3 + 2 * number], strict=True):
            torch.testing.assert_close(whole[number, :size], own)
            assert not whole[number, size:].any()


def test_a_single_task():
    heads, x = heads_of([3, 2]), torch.randn(4, 6, dtype=torch.float64)
    expected, packed = heads[2](x), PackedHeads(heads)
    assert torch.equal(packed(x, 2), expected)
    packed(x, 2).sum().backward()
    assert not packed.weight.grad[0].any()
    assert packed.weight.grad[1, :2].all()
    assert not packed.weight.grad[1, 2].any()


def test_heads_are_parts_until_they_are_released():
    heads = heads_of([3, 2])
    packed = PackedHeads(heads)
    with torch.no_grad():
        packed.weight[1].fill_(7)
        heads[0].bias.fill_(5)
    assert heads[2].weight.unique().tolist() == [7]
    assert packed.bias[0].tolist() == [5, 5, 5]
    packed.weight.data = packed.weight.detach().clone() + 1  # as a stack of runs does
    state = {packed.weight: {"momentum_buffer": torch.ones_like(packed.weight), "step": torch.tensor(3.0)}}
    packed.follow(state)
    state[packed.weight]["momentum_buffer"][1].fill_(4)
    assert heads[2].weight.unique().tolist() == [8]
    assert state[heads[2].weight]["momentum_buffer"].tolist() == [[4.0] * 6] * 2
    assert state[heads[2].weight]["step"] == 3
    packed.release()
    with torch.no_grad():
        packed.weight.fill_(0)
    assert heads[2].weight.unique().tolist() == [8]


def test_two_parameters_stand_for_those_of_the_heads():
    heads, other = heads_of([3, 2]), nn.Parameter(torch.zeros(1))
    packed = PackedHeads(heads)
    found = packed.replace([other, *heads[0].parameters(), *heads[2].parameters()])
    assert [id(p) for p in found] == [id(other), id(packed.weight), id(packed.bias)]
    assert packed.replace([other])[0] is other


def learned(name, how, monkeypatch, *, packed):
    tasks = [toy_tasks(4, classes=count)[k] for k, count in enumerate((3, 5, 2, 3))]
    method = make(name, tasks)
    if not packed:
        monkeypatch.setattr(fit_loop, "pack", lambda net: None)
    learn(method, tasks[:3], Trainer(Regime(epochs=3, batch=16, **how)))
    monkeypatch.undo()
    return method, tasks


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MIXING)
def test_the_same_is_learned_as_by_heads_of_their_own(name, optimizer, monkeypatch):
    both = [learned(name, OPTIMIZERS[optimizer], monkeypatch, packed=packed) for packed in (True, False)]
    for task in both[0][1]:
        one, two = (logits(method, task) for method, _ in both)
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", MIXING)
def test_heads_are_packed_while_a_task_is_fitted_and_no_longer(name):
    tasks, seen = toy_tasks(3), []
    method = make(name, tasks)

    def note(_):
        seen.append(sorted(method.net.packed.heads))
        storage = {head.weight.untyped_storage().data_ptr() for head in method.net.heads}
        assert len(storage) == 4 - len(seen[-1])

    learn(method, tasks[:2], Trainer(Regime(epochs=1, batch=16), progress=note))
    assert seen == [[0], [0, 1]]
    assert method.net.packed is None
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in method.parameters())


@pytest.mark.parametrize("name", MIXING)
def test_a_fit_of_the_users_own_finds_gradients_in_the_heads(name):
    tasks = toy_tasks(2)
    method = make(name, tasks).train()
    learn(method, tasks[:1])

    def fit(method, task, **_):
        method.train()
        batch = task.train.take(torch.arange(16), torch.tensor(0), torch.tensor(1), 16)
        found = method.loss(batch)
        (found[0] if isinstance(found, tuple) else found).backward()
        assert all(p.grad is not None for p in method.net.heads[1].parameters())

    method.learn(tasks[1], FunctionFit(fit))


class OppositeHalves:
    """Two ranks, of which the other always has the opposite gradients, so that their sum is zero."""

    rank, size = 0, 2

    def sum_parts(self, parameters, loss):
        for parameter in parameters:
            parameter.grad = None if parameter.grad is None else torch.zeros_like(parameter.grad)
        return loss


@pytest.mark.parametrize("name", [name for name in MIXING if METHODS[name].splits_batches])
def test_the_gradients_of_packed_heads_are_summed_over_ranks(name):
    tasks = toy_tasks(2)
    method = make(name, tasks)
    before = copy.deepcopy(method.net.state_dict())
    fit = Trainer(Regime(epochs=1, batch=16, accumulate=2), engine="eager")
    fit.ranks = OppositeHalves()
    learn(method, tasks, fit)
    after = method.net.state_dict()
    assert [key for key, value in before.items() if "heads" in key and not torch.equal(value, after[key])] == []


def test_a_head_that_the_user_froze_stays():
    tasks = toy_tasks(3)
    method = make("er", tasks)
    learn(method, tasks[:1])
    method.net.heads[0].requires_grad_(False)
    before = [p.clone() for p in method.net.heads[0].parameters()]
    learn(method, tasks[1:], Trainer(Regime(epochs=1, batch=16, optimizer="adamw", weight_decay=0.1)))
    assert all(torch.equal(p, q) for p, q in zip(method.net.heads[0].parameters(), before, strict=True))


@pytest.mark.parametrize("name", MIXING)
def test_a_callback_may_ask_for_any_task_and_copies_train_their_heads(name):
    tasks, seen = toy_tasks(3, classes=2)[:2] + toy_tasks(3, classes=4)[2:], []
    method, x, task = make(name, tasks), tasks[0].train.inputs(torch.arange(6)), torch.arange(6) % 3
    for part in method.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0

    def compare(_):
        assert method.training
        found, copied = method(x, task), copy.deepcopy(method)
        for k in range(3):
            own = method(x, k)[k::3]
            torch.testing.assert_close(found[k::3, : own.shape[1]], own)
        copied(x, task).logsumexp(1).sum().backward()
        assert all(p.grad is not None for p in copied.net.heads.parameters())
        assert copied.net.packed is None
        seen.append(method.net.packed is not None)

    method.learn(tasks[2], Trainer(Regime(epochs=2, batch=16), progress=compare))
    assert seen == [True, True]


def test_a_class_of_the_users_own_that_changes_the_step_has_heads_of_their_own():
    """Its loss may take any parameter by itself, whose gradient would be lost."""

    class Small(ER):
        def loss(self, batch):
            return super().loss(batch) + 3 * sum(p.square().sum() for p in self.net.parameters())

    tasks = toy_tasks(2)
    method = Small(make("er", tasks).net)
    before = method.net.heads[0].weight.norm()
    method.learn(tasks[0], Trainer(Regime(epochs=5, batch=16, lr=0.05)))
    assert method.net.heads[0].weight.norm() < 0.2 * before


@pytest.mark.parametrize("how", ["tied", "parametrized", "hooked"])
def test_heads_that_the_user_changed_are_not_packed(how):
    tasks, seen = toy_tasks(3), []
    method = make("er", tasks)
    learn(method, tasks[:1])
    first, second = method.net.heads[:2]
    if how == "tied":
        second.weight = first.weight
    elif how == "parametrized":
        nn.utils.parametrizations.weight_norm(first)
    else:
        first.register_forward_hook(lambda *_: None)
    learn(method, tasks[1:2], Trainer(Regime(epochs=1, batch=16), progress=lambda _: seen.append(method.net.packed)))
    assert seen == [None]
    assert how != "tied" or second.weight is first.weight


@pytest.mark.parametrize("order", [(0, 1), (2, 0)])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", MIXING)
def test_a_task_after_a_forgotten_one_that_had_more_classes(name, seed, order):
    tasks = [toy_tasks(3, classes=count, seed=seed)[k] for k, count in enumerate((5, 2, 7))]
    method = METHODS[name](make(name, tasks).net, **({"memory": 10} if name in ("er", "derpp") else {}))
    fit = Trainer(Regime(epochs=3, batch=16))
    method.learn(tasks[order[0]], fit)
    method.forget_task(order[0])
    method.learn(tasks[order[1]], fit)
    assert [*method.history] == [order[1]]
