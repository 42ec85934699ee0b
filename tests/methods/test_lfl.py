"""LFL against its formulas, in float64, and the parts of the network that it stops."""

import copy

import pytest
import torch
from torch import Tensor, nn

from hatrack import LFL, Diverged, Network, Regime, Trainer
from hatrack.methods.lfl import last_dropouts
from hatrack.networks.alexnet import alexnet
from hatrack.networks.mlp import mlp
from hatrack.seeds import seeded
from hatrack.tasks.split import Batch
from tests.helpers.learning import OPTIMIZERS, FunctionFit, learn, logits, make
from tests.helpers.toys import toy_tasks


def make_lfl(tasks, *, heads="multi", dropout=0.0, **options) -> LFL:
    with seeded(0, "weights"):
        trunk = mlp(tasks[0].shape, widths=(8, 6), dropout=dropout, input_dropout=dropout)
    return LFL(Network(trunk, [t.classes for t in tasks], tasks[0].train.inputs(torch.arange(2)), heads=heads), **options)


def first_batch(task) -> Batch:
    return task.train.take(torch.arange(9), torch.tensor(0), torch.tensor(1), 9)


def plain_loss(net: Network, old: nn.Module | None, batch: Batch, strength: float) -> float:
    """In float64, example by example: the mean of the cross-entropies, and the sum of all squared differences."""
    net = copy.deepcopy(net).double().eval()
    x, right, apart = batch.x.double(), 0.0, 0.0
    with torch.no_grad():
        answers, features = net(x, batch.task), net.trunk(x)
        before = features if old is None else copy.deepcopy(old).double().eval()(x)
    for i, y in enumerate(batch.y.tolist()):
        odds = [torch.tensor(v, dtype=torch.float64).exp().item() for v in answers[i].tolist()]
        right -= torch.tensor(odds[y] / sum(odds), dtype=torch.float64).log().item()
        apart += sum((a - b) ** 2 for a, b in zip(features[i].tolist(), before[i].tolist(), strict=True))
    return right / len(batch.y) + strength * apart / 2


@pytest.mark.parametrize("heads", ["multi", "shared"])
@pytest.mark.parametrize(
    ("order", "penalised"), [((0, 1, 2), True), ((2, 0), True), ((0, 1, 0), True), ((1,), False), ((0, 0), False)]
)
def test_the_loss_is_that_of_a_plain_loop(order, penalised, heads):
    tasks = toy_tasks(3)
    method = make_lfl(tasks, heads=heads, strength=0.02)
    learn(method, [tasks[k] for k in order[:-1]])
    old, batch, seen = copy.deepcopy(method.net.trunk), first_batch(tasks[order[-1]]), []

    def fit(method, task):
        draw = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for p in method.net.parameters():
                p += 0.3 * torch.randn(p.shape, generator=draw)
        found = method.loss(batch).item()
        seen.extend([found, *(plain_loss(method.net, teacher, batch, 0.02) for teacher in (old, None))])

    method.learn(tasks[order[-1]], FunctionFit(fit))
    found, with_old, without = seen
    assert found == pytest.approx(with_old if penalised else without, rel=1e-5)
    assert with_old > without + 1e-3, "the old features count"


def test_the_first_task_is_plain_sgd():
    """In a network without dropout."""
    tasks = toy_tasks(2)
    method = make_lfl(tasks)
    plain = make("sgd", tasks).__class__(make_lfl(tasks).net)
    for one in (method, plain):
        learn(one, tasks[:1])
    assert torch.equal(logits(method, tasks[0]), logits(plain, tasks[0]))
    for one in (method, plain):
        learn(one, tasks[1:])
    assert not torch.equal(logits(method, tasks[0]), logits(plain, tasks[0])), "the second is not"


class Odd(nn.Module):
    """Not a sequence; its dropouts are named in another order than they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.inner, self.layer, self.never = nn.Dropout(), nn.Dropout(), nn.Linear(16, 5), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.layer(self.inner(x.flatten(1)))))


@pytest.mark.parametrize(("trunk", "shape", "expected"), [
    (lambda: mlp((1, 4, 4), widths=(8, 6)), (1, 4, 4), ["7"]),
    (lambda: mlp((1, 4, 4), widths=(8, 6), dropout=0.0), (1, 4, 4), []),
    (lambda: alexnet((3, 32, 32)), (3, 32, 32), None),
    (Odd, (1, 4, 4), ["last"]),
    (lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Dropout(), nn.ReLU()), (1, 4, 4), []),
    (lambda: nn.Sequential(nn.Flatten(), nn.Dropout(), nn.AlphaDropout()), (1, 4, 4), ["1", "2"]),
])  # fmt: skip
def test_the_dropout_at_the_end_of_the_trunk_is_found(trunk, shape, expected):
    trunk = trunk()
    net = Network(trunk, [3], torch.randn(2, *shape)).train()
    if expected is None:
        expected = [name for name, part in trunk.named_modules() if isinstance(part, nn.Dropout)][-1:]
    assert last_dropouts(net) == expected
    method = LFL(net).train()
    off = [name for name, part in method.net.trunk.named_modules() if not part.training]
    assert off == expected
    assert not any(part._forward_hooks for part in trunk.modules())


def test_dropout_before_the_features_stays_on():
    tasks = toy_tasks(1)
    method = make_lfl(tasks, dropout=0.5).train()
    x = first_batch(tasks[0]).x
    torch.manual_seed(0)
    features = [method.net.trunk(x) for _ in range(2)]
    assert not torch.equal(*features)
    assert [part.training for part in method.net.trunk if isinstance(part, nn.Dropout)] == [True, True, False]
    method.eval()
    assert torch.equal(method.net.trunk(x), method.net.trunk(x))


def test_a_shared_head_is_frozen_after_the_first_task():
    tasks = toy_tasks(3)
    for freeze in (True, False):
        method = make_lfl(tasks, heads="shared", freeze_head=freeze)
        (head,) = method.net.heads
        initial = head.weight.detach().clone()
        learn(method, tasks[:1])
        first = head.weight.detach().clone()
        assert not torch.equal(initial, first)
        trunk = method.net.trunk[1].weight.detach().clone()
        fit = Trainer(Regime(epochs=4, batch=16, **OPTIMIZERS["kept adamw with decay"]))
        learn(method, tasks[1:], fit)
        assert torch.equal(first, head.weight) == freeze
        assert not torch.equal(trunk, method.net.trunk[1].weight)
        assert all(p.requires_grad for p in method.parameters())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_heads_of_earlier_tasks_keep_their_bits(optimizer):
    tasks = toy_tasks(2)
    method = make_lfl(tasks)
    fit = Trainer(Regime(epochs=3, batch=16, **OPTIMIZERS[optimizer]))
    method.learn(tasks[0], fit)
    before = copy.deepcopy(method.net.heads.state_dict())
    method.learn(tasks[1], fit)
    after = method.net.heads.state_dict()
    assert [torch.equal(before[key], after[key]) for key in ("0.weight", "0.bias", "1.weight", "1.bias")] == [True] * 2 + [
        False
    ] * 2


def test_the_teacher_does_not_change_and_is_no_part_of_the_method():
    tasks = toy_tasks(2)
    method = make_lfl(tasks, dropout=0.5)
    learn(method, tasks[:1])
    names, before = set(method.state_dict()), copy.deepcopy(method.net.trunk.state_dict())
    trainer = Trainer(Regime(epochs=2, batch=16, lr=0.1))

    def fit(method, task):
        trainer(method, task)
        method.train()
        (teacher,) = method.teacher
        assert not any(part.training for part in teacher.modules())
        assert all(torch.equal(before[key], value) for key, value in teacher.state_dict().items())
        assert all(p.grad is None and not p.requires_grad for p in teacher.parameters())
        assert set(method.state_dict()) == names

    method.learn(tasks[1], FunctionFit(fit))
    assert not torch.equal(before["2.weight"], method.net.trunk[2].weight)
    assert method.teacher == []


def test_after_an_error_the_teacher_is_dropped():
    tasks = toy_tasks(2)
    method = make_lfl(tasks, heads="shared")
    learn(method, tasks[:1])
    with pytest.raises(Diverged):
        method.learn(tasks[1], Trainer(Regime(epochs=3, batch=16, lr=3e38, clip=0.0)))
    assert method.learned.tolist() == [True, False]
    assert method.teacher == []
    assert all(p.requires_grad for p in method.parameters())


def test_features_of_new_images_are_kept():
    tasks = toy_tasks(2)
    change = {}
    for strength in (0.0, 0.05):
        method = make_lfl(tasks, strength=strength)
        fit = Trainer(Regime(epochs=15, batch=8, lr=0.05, restore=False))
        method.learn(tasks[0], fit)
        x = tasks[1].train.inputs(torch.arange(len(tasks[1].train)))
        before = method.net.trunk(x).detach()
        method.learn(tasks[1], fit)
        change[strength] = (method.net.trunk(x) - before).square().mean().item()
    assert change[0.05] < change[0.0] / 2


@pytest.mark.parametrize("heads", ["multi", "shared"])
def test_a_loaded_method_continues_in_the_same_way(heads):
    """The teacher need not be in a checkpoint."""
    tasks = toy_tasks(3)
    method, twin = make("lfl", tasks, heads=heads), make("lfl", tasks, seed=1, heads=heads)
    learn(method, tasks[:2])
    twin.net.seed = method.net.seed
    twin.load_state_dict(copy.deepcopy(method.state_dict()))
    for one in (method, twin):
        learn(one, tasks[2:])
    assert all(torch.equal(a, b) for a, b in zip(method.state_dict().values(), twin.state_dict().values(), strict=True))
    assert method.learned.all()
