"""LwF against its formulas, worked out in float64 with the softmax and the power of the paper."""

import copy

import pytest
import torch
from torch import Tensor

from hatrack import Diverged, LwF, Method, Network, Regime, Trainer
from hatrack.methods.lwf import distillation
from hatrack.networks.mlp import mlp
from hatrack.seeds import seeded
from hatrack.tasks.split import Batch
from tests.helpers.learning import FunctionFit, learn, logits, make
from tests.helpers.toys import toy_tasks


def make_lwf(tasks, *, heads="multi", dropout=0.0, **options) -> LwF:
    with seeded(0, "weights"):
        trunk = mlp(tasks[0].shape, widths=(8, 6), dropout=dropout, input_dropout=dropout)
    return LwF(Network(trunk, [t.classes for t in tasks], tasks[0].train.inputs(torch.arange(2)), heads=heads), **options)


def first_batch(task) -> Batch:
    return task.train.take(torch.arange(9), torch.tensor(0), torch.tensor(1), 9)


def softened(logits: Tensor, temperature: float) -> Tensor:
    """As the paper writes it: probabilities to the power 1/T, over their sum."""
    p = logits.exp() / logits.exp().sum(1, keepdim=True)
    p = p ** (1 / temperature)
    return p / p.sum(1, keepdim=True)


def plain_loss(net: Network, old: Network, batch: Batch, earlier: list[int], strength: float, temperature: float) -> float:
    """In float64, example by example."""
    net, old = copy.deepcopy(net).double().eval(), copy.deepcopy(old).double().eval()
    x, total = batch.x.double(), 0.0
    with torch.no_grad():
        for i, y in enumerate(batch.y.tolist()):
            total -= softened(net(x, batch.task), 1.0)[i, y].log().item()
            for task in earlier:
                answer, target = (softened(one(x, task), temperature)[i].tolist() for one in (net, old))
                total -= strength * sum(t * torch.tensor(a).log().item() for a, t in zip(answer, target, strict=True))
    return total / len(batch.y)


@torch.no_grad()
def disturb(net: Network) -> None:
    draw = torch.Generator().manual_seed(3)
    for p in net.parameters():
        p += 0.3 * torch.randn(p.shape, generator=draw)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 4.0])
def test_distillation_by_the_papers_formula(temperature):
    torch.manual_seed(0)
    new, old = torch.randn(5, 4, dtype=torch.float64) * 3, torch.randn(5, 4, dtype=torch.float64) * 3
    expected = -(softened(old, temperature) * softened(new, temperature).log()).sum(1).mean()
    torch.testing.assert_close(distillation(new, old, temperature), expected)
    torch.testing.assert_close(distillation(new.float(), old.float(), temperature).double(), expected, rtol=1e-5, atol=0)


def test_distillation_of_extreme_answers_is_finite():
    """Where the paper's formula has log 0: p = 0 in float32."""
    new, old = torch.tensor([[0.0, 500.0]], requires_grad=True), torch.tensor([[300.0, 0.0]])
    loss = distillation(new, old, 1.0)
    loss.backward()
    assert loss.item() == pytest.approx(500.0)
    assert new.grad.tolist() == [[-1.0, 1.0]]


@pytest.mark.parametrize(("order", "heads", "earlier"), [
    ((0, 1, 2), "multi", [0, 1]),
    ((2, 0, 1), "multi", [0, 2]),
    ((2, 1), "multi", [2]),
    ((0, 1, 0), "multi", [1]),  # a task that is learned again has no distillation term
    ((1,), "multi", []),
    ((0, 0), "multi", []),
    ((0, 1, 2), "shared", [1]),  # one head has the same output for every task
    ((2,), "shared", []),
])  # fmt: skip
def test_the_loss_is_that_of_a_plain_loop(order, heads, earlier):
    tasks = toy_tasks(3)
    method = make_lwf(tasks, heads=heads, strength=0.7, temperature=2.0)
    learn(method, [tasks[k] for k in order[:-1]])
    old, batch, seen = copy.deepcopy(method.net), first_batch(tasks[order[-1]]), []

    def fit(method, task):
        disturb(method.net)
        seen.append((method.loss(batch).item(), plain_loss(method.net, old, batch, earlier, 0.7, 2.0)))
        seen.append((method.loss(batch).item(), plain_loss(method.net, old, batch, [], 0.7, 2.0)))

    method.learn(tasks[order[-1]], FunctionFit(fit))
    assert seen[0][0] == pytest.approx(seen[0][1], rel=1e-5)
    assert (seen[1][0] != pytest.approx(seen[1][1], rel=1e-3)) == bool(earlier), "the old answers count"


def test_the_first_task_is_plain_sgd():
    tasks = toy_tasks(2)
    method, plain = make("lwf", tasks), make("sgd", tasks)
    for one in (method, plain):
        learn(one, tasks[:1])
    assert torch.equal(logits(method, tasks[0]), logits(plain, tasks[0]))
    for one in (method, plain):
        learn(one, tasks[1:])
    assert not torch.equal(logits(method, tasks[0]), logits(plain, tasks[0])), "the second is not"


def test_the_teacher_does_not_change_and_is_no_part_of_the_method():
    tasks = toy_tasks(2)
    method = make_lwf(tasks, dropout=0.5)
    learn(method, tasks[:1])
    names, before = set(method.state_dict()), copy.deepcopy(method.net.state_dict())
    trainer = Trainer(Regime(epochs=2, batch=16, lr=0.1))

    def fit(method, task):
        trainer(method, task)
        method.train()
        (teacher,) = method.teacher
        assert not any(part.training for part in teacher.modules())
        assert all(
            torch.equal(before[key], value)
            for key, value in teacher.state_dict().items()
            if key in dict(teacher.named_parameters())
        )
        assert all(p.grad is None and not p.requires_grad for p in teacher.parameters())
        assert set(method.state_dict()) == names
        assert sum(p.numel() for p in method.parameters()) == sum(p.numel() for p in method.net.parameters())
        old = teacher.trunk(first_batch(task).x)
        assert torch.equal(old, teacher.trunk(first_batch(task).x)), "no dropout"

    method.learn(tasks[1], FunctionFit(fit))
    assert not torch.equal(before["trunk.2.weight"], method.net.trunk[2].weight)
    assert method.teacher == []


def test_after_an_error_the_teacher_is_dropped():
    tasks = toy_tasks(2)
    method = make_lwf(tasks)
    learn(method, tasks[:1])
    with pytest.raises(Diverged):
        method.learn(tasks[1], Trainer(Regime(epochs=3, batch=16, lr=3e38, clip=0.0)))
    assert method.learned.tolist() == [True, False]
    assert method.teacher == []


def test_earlier_heads_learn_too():
    """The distillation term moves them; heads of later tasks have none."""
    tasks = toy_tasks(3)
    method = make_lwf(tasks)
    learn(method, tasks[:1])
    before = [head.weight.detach().clone() for head in method.net.heads]
    learn(method, tasks[1:2])
    assert [torch.equal(a, b.weight) for a, b in zip(before, method.net.heads, strict=True)] == [False, False, True]


def test_old_answers_to_new_images_are_kept():
    tasks = toy_tasks(2)
    change = {}
    for name, method in (("sgd", Method(make_lwf(tasks).net)), ("lwf", make_lwf(tasks, temperature=2.0))):
        fit = Trainer(Regime(epochs=15, batch=8, lr=0.1, restore=False))
        method.learn(tasks[0], fit)
        x = tasks[1].train.inputs(torch.arange(len(tasks[1].train)))
        before = method(x, 0).softmax(1).detach()
        method.learn(tasks[1], fit)
        change[name] = (method(x, 0).softmax(1) - before).abs().mean().item()
    assert change["lwf"] < change["sgd"] / 2


def test_a_loaded_method_continues_in_the_same_way():
    """The teacher need not be in a checkpoint."""
    tasks = toy_tasks(3)
    method, twin = make("lwf", tasks), make("lwf", tasks, seed=1)
    learn(method, tasks[:2])
    twin.net.seed = method.net.seed
    twin.load_state_dict(copy.deepcopy(method.state_dict()))
    for one in (method, twin):
        learn(one, tasks[2:])
    assert all(torch.equal(a, b) for a, b in zip(method.state_dict().values(), twin.state_dict().values(), strict=True))
    assert method.learned.all()
