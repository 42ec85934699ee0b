"""A-GEM against its formula, worked out in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from hatrack import METHODS, Network, Regime, Trainer, evaluate
from hatrack.methods.agem import AGEM, draw_per_class, project
from hatrack.networks.mlp import mlp
from hatrack.seeds import generator, seeded
from hatrack.tasks.split import Batch
from hatrack.tasks.task import Task
from tests.helpers.learning import FunctionFit, learn, logits
from tests.helpers.toys import toy_tasks


def make_agem(tasks: list[Task], *, widths=(12,), heads: str = "multi", known: int | None = None, **options) -> AGEM:
    with seeded(0, "weights"):
        trunk = mlp(tasks[0].shape, widths=widths, dropout=0.0, input_dropout=0.0)
    classes = [t.classes for t in tasks[:known]]
    return AGEM(Network(trunk, classes, tasks[0].train.inputs(torch.arange(2)), heads=heads), **options)


def batch_of(task: Task, count: int) -> Batch:
    return task.train.take(torch.arange(count), torch.tensor(0), torch.tensor(1), count)


# The projection

VECTORS = st.tuples(st.integers(0, 10_000), st.integers(1, 300), st.floats(-12, 12), st.floats(-1, 1))


@settings(deadline=None, max_examples=200)
@given(VECTORS)
def test_never_against_the_reference(drawn):
    seed, size, magnitude, bias = drawn
    source = torch.Generator().manual_seed(seed)
    r = torch.randn(size, generator=source)
    g = torch.randn(size, generator=source) + bias * r
    r = r * 10**magnitude
    inner = (project(g, r).double() * r.double()).sum()
    assert inner >= -1e-6 * g.double().norm() * r.double().norm()


def test_never_against_the_reference_in_a_large_network():
    source = torch.Generator().manual_seed(0)
    r = torch.randn(2_000_000, generator=source)
    g = torch.randn(2_000_000, generator=source) - r
    inner = (project(g, r).double() * r.double()).sum()
    assert abs(inner) <= 1e-6 * g.double().norm() * r.double().norm()


@settings(deadline=None, max_examples=100)
@given(VECTORS)
def test_the_projection_in_float64(drawn):
    seed, size, magnitude, bias = drawn
    source = torch.Generator().manual_seed(seed)
    r = torch.randn(size, generator=source)
    g = torch.randn(size, generator=source) + bias * r
    r = r * 10**magnitude
    a, b = g.double(), r.double()
    expected = a - (a @ b) / (b @ b) * b if a @ b < 0 else a
    torch.testing.assert_close(project(g, r).double(), expected, rtol=1e-4, atol=1e-5)


def test_the_projection_by_hand():
    g, r = torch.tensor([1.0, -3.0, 2.0]), torch.tensor([0.0, 2.0, 0.0])
    assert project(g, r).tolist() == [1, 0, 2]
    assert project(g, -r).tolist() == [1, -3, 2]


def test_without_conflict_not_a_bit_changes():
    source = torch.Generator().manual_seed(1)
    r = torch.randn(1000, generator=source)
    g = torch.cat([torch.randn(999, generator=source) + r[:999], torch.tensor([-0.0])])
    assert torch.equal(project(g, r).view(torch.int32), g.view(torch.int32))


@pytest.mark.parametrize("r", [0.0, 1e-42, 1e-30, 1e30, float("nan"), float("inf")])
def test_any_reference_gives_a_defined_gradient(r):
    g = torch.tensor([-1.0, 2.0])
    projected = project(g, torch.tensor([r, 0.0]))
    assert projected.tolist() == ([0, 2] if 0 < r < 1e31 else [-1, 2])


# The method


def references(agem: AGEM, seed: int, task: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The gradient on the batch that `edit_grads` would draw at this seed, head by head, in float64."""
    torch.manual_seed(seed)
    x, y, owner, _ = agem.memory.sample(agem.reference, agem.memory.without(task))
    weights = {name: p.detach().double().requires_grad_() for name, p in agem.net.named_parameters()}
    total = torch.zeros((), dtype=torch.float64)
    for k in set(owner.tolist()):
        rows = owner == k
        answer = torch.func.functional_call(agem.net, weights, (x[rows].double(), k))
        total = total + F.cross_entropy(answer, y[rows], reduction="sum")
    found = torch.autograd.grad(total / len(y), list(weights.values()), allow_unused=True, materialize_grads=True)
    return owner, dict(zip(weights, found, strict=True))


def test_the_gradient_of_a_step():
    """Against all of it in float64, with and without a conflict: the trunk and the heads of earlier tasks as well."""
    tasks = toy_tasks(4)
    agem = make_agem(tasks, reference=40)
    learn(agem, tasks[:2])
    agem.learn(tasks[2], FunctionFit(lambda method, task: None))  # prepares task 2 without training
    batch = batch_of(tasks[2], 16)
    weights = dict(agem.net.named_parameters())
    owner, reference = references(agem, 5, task=2)
    assert set(owner.tolist()) == {0, 1}, "memory of the task itself is not used"
    square = sum(r.square().sum() for r in reference.values())
    conflicts = []
    for sign in (1, -1):
        agem.zero_grad()
        (sign * 0.1 * agem.loss(batch)).backward()
        g = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in weights.items()}
        inner = sum((g[name].double() * reference[name]).sum() for name in g)
        conflicts.append(bool(inner < 0))
        torch.manual_seed(5)
        with torch.no_grad():
            agem.edit_grads(batch, None)
        for name, p in weights.items():
            if name in ("heads.3.weight", "heads.3.bias"):
                assert p.grad is None, "a task to come"
            else:
                expected = g[name].double() - (inner / square * reference[name] if inner < 0 else 0)
                torch.testing.assert_close(p.grad.double(), expected, rtol=1e-4, atol=1e-6)
        assert bool(weights["heads.0.weight"].grad.any()) == (inner < 0), "the projection moves heads of earlier tasks"
    assert sorted(conflicts) == [False, True]


def test_the_first_task_is_plain_sgd_and_later_ones_are_not():
    tasks = toy_tasks(6)
    agem = make_agem(tasks, heads="shared")
    plain = METHODS["sgd"](make_agem(tasks, heads="shared").net)
    for method in (agem, plain):
        learn(method, tasks[:1])
    assert torch.equal(logits(agem, tasks[0]), logits(plain, tasks[0]))
    for method in (agem, plain):
        learn(method, tasks[1:])
    assert not torch.equal(logits(agem, tasks[0]), logits(plain, tasks[0]))


def test_what_is_remembered():
    tasks = toy_tasks(3)
    agem = make_agem(tasks, known=1, per_class=4)
    learn(agem, tasks[:1])
    for task in tasks[1:]:
        agem.net.add_task(task.classes)
        learn(agem, [task])
    memory = agem.memory
    assert memory.used.sum().item() == 3 * 3 * 4
    for k in memory.used.nonzero().flatten().tolist():
        train = tasks[int(memory.task[k])].train
        same = (train.inputs(torch.arange(len(train))) == memory.x[k]).flatten(1).all(1)
        assert train.y[same].tolist() == [memory.y[k].item()]
    pairs = [(int(memory.task[k]), int(memory.y[k])) for k in memory.used.nonzero().flatten()]
    assert all(pairs.count(pair) == 4 for pair in pairs)


def test_some_of_each_class():
    y = torch.tensor([0, 2, 0, 2, 2, 0, 2, 1])
    chosen = draw_per_class(y, 2, generator(0, "here"))
    assert y[chosen].tolist() == [0, 0, 1, 2, 2]
    assert len(set(chosen.tolist())) == 5
    draws = {tuple(draw_per_class(y, 2, generator(k, "here")).tolist()) for k in range(20)}
    assert len(draws) > 5, "they are drawn, not the first"


def test_a_task_learned_again_replaces_what_was_remembered_of_it():
    tasks, others = toy_tasks(2), toy_tasks(2, seed=5, train=12)
    agem = make_agem(tasks, per_class=10)
    learn(agem, [*tasks, others[0]])
    memory = agem.memory
    images = others[0].train.inputs(torch.arange(len(others[0].train)))
    again = memory.used & (memory.task == 0)
    assert again.sum().item() == len(images), "fewer than there is room for"
    assert all((images == x).flatten(1).all(1).any() for x in memory.x[again])


def test_it_forgets_less_than_sgd():
    tasks = toy_tasks(8)
    results = []
    for method in (make_agem(tasks, heads="shared"), METHODS["sgd"](make_agem(tasks, heads="shared").net)):
        learn(method, tasks, Trainer(Regime(epochs=6, batch=8, lr=0.2)))
        results.append(sum(evaluate(method, task.test).accuracy for task in tasks) / 8)
    assert results[0] > results[1] + 0.05


def test_frozen_parts_are_left_out():
    tasks = toy_tasks(2)
    trunk = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
    net = Network(trunk, [3, 3], tasks[0].train.inputs(torch.arange(2)), freeze="1")
    before = trunk[1].weight.clone()
    learn(AGEM(net), tasks)
    assert torch.equal(before, trunk[1].weight)


@pytest.mark.parametrize("wrong", [{"per_class": 0}, {"reference": 0}])
def test_wrong_options(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        make_agem(toy_tasks(1), **wrong)
