"""SI against its formulas: the account of every weight, in float64 and by plain loops."""

import copy
import math

import pytest
import torch
from torch import nn

from hatrack import SI, Network, Regime, Trainer
from hatrack.methods.parts.vectors import values
from hatrack.networks.mlp import mlp
from hatrack.tasks.split import Batch
from tests.helpers.learning import learn, logits, make
from tests.helpers.toys import toy_tasks

CURVATURE = (0.5, 1.0, 2.0, 0.25, 3.0, 1.5)
TARGETS = ((1.0, -1.0, 0.5, 2.0, 0.0, 1.0), (-1.0, 0.0, 1.0, 1.0, 0.5, -2.0))


class Bowl(SI):
    """The weights roll in the bowl sum k (theta - target)^2 / 2; every task has its own target."""

    def loss(self, batch: Batch):
        k, target = (torch.asarray(t, dtype=torch.float64) for t in (CURVATURE, TARGETS[batch.task]))
        return (k * (values(self.net.shared_parameters()) - target).square()).sum() / 2


def make_bowl(**options) -> Bowl:
    tasks = toy_tasks(2, shape=(2,))
    torch.manual_seed(0)
    net = Network(nn.Linear(2, 3, bias=False), [3, 3], tasks[0].train.inputs(torch.arange(2)))
    return Bowl(net, **options).double()


class PlainLoop:
    """The same in Python floats: weights, optimizers and SI's account, one weight after the other."""

    def __init__(self, weights: list[float], c: float, xi: float) -> None:
        self.theta, self.anchor, self.c, self.xi = list(weights), list(weights), c, xi
        self.omega, self.big_omega = [0.0] * len(weights), [0.0] * len(weights)
        self.reset()

    def reset(self) -> None:
        self.steps = 0
        self.first, self.second = [0.0] * len(self.theta), [0.0] * len(self.theta)

    def step(self, task: int, regime: Regime) -> None:
        self.steps += 1
        pairs = list(zip(CURVATURE, self.theta, TARGETS[task], strict=True))
        plain = [k * (theta - target) for k, theta, target in pairs]
        held = [
            g + 2 * self.c * s * (t - a) for g, s, t, a in zip(plain, self.big_omega, self.theta, self.anchor, strict=True)
        ]
        norm = math.sqrt(sum(g * g for g in held))
        scale = min(1.0, regime.clip / (norm + 1e-6)) if regime.clip else 1.0
        for i, g in enumerate(held):
            delta = -regime.lr * self.direction(i, g * scale, regime)
            self.omega[i] += -plain[i] * delta
            self.theta[i] += delta

    def direction(self, i: int, g: float, regime: Regime) -> float:
        if regime.optimizer == "sgd":
            return g
        if regime.optimizer == "momentum":
            self.first[i] = regime.momentum * self.first[i] + g
            return self.first[i]
        self.first[i] = 0.9 * self.first[i] + 0.1 * g
        self.second[i] = 0.999 * self.second[i] + 0.001 * g * g
        mean, spread = self.first[i] / (1 - 0.9**self.steps), self.second[i] / (1 - 0.999**self.steps)
        return mean / (math.sqrt(spread) + 1e-8)

    def end(self) -> None:
        for i, theta in enumerate(self.theta):
            self.big_omega[i] = max(0.0, self.big_omega[i] + self.omega[i] / ((theta - self.anchor[i]) ** 2 + self.xi))
        self.anchor, self.omega = list(self.theta), [0.0] * len(self.theta)


def regime(**changes) -> Regime:
    return Regime(**{"epochs": 3, "batch": 16, "lr": 0.125, "schedule": "constant", **changes})


@pytest.mark.parametrize("keep_state", [False, True])
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_two_tasks_as_a_plain_loop_has_them(optimizer, clip, keep_state):
    tasks = toy_tasks(2, shape=(2,), train=64, valid=0.0)  # 4 batches an epoch
    bowl = make_bowl(c=0.4, xi=0.05)
    loop = PlainLoop(values(bowl.net.shared_parameters()).tolist(), c=0.4, xi=0.05)
    how = regime(optimizer=optimizer, clip=clip, keep_state=keep_state)
    fit = Trainer(how)
    for task in tasks:
        bowl.learn(task, fit)
        for _ in range(12):
            loop.step(task.index, how)
        loop.end()
        if not keep_state:
            loop.reset()
        for name, expected in (("anchor", loop.theta), ("importance", loop.big_omega), ("path", [0.0] * 6)):
            torch.testing.assert_close(getattr(bowl, name).tolist(), expected, rtol=1e-9, atol=1e-12)
        assert torch.equal(values(bowl.net.shared_parameters()), bowl.anchor)
    assert max(loop.big_omega) > 0


def test_the_account_is_the_fall_of_the_loss():
    """Each weight earns its own part of the fall, up to the curvature within the steps: L falls by the account less the sum
    of k delta^2 / 2, exactly, on a bowl; and that sum vanishes with the learning rate."""
    tasks = toy_tasks(1, shape=(2,), train=64, valid=0.0)
    bowl = make_bowl()
    k, target = (torch.asarray(t, dtype=torch.float64) for t in (CURVATURE, TARGETS[0]))
    start = values(bowl.net.shared_parameters()).detach().clone()
    Trainer(regime(epochs=100, lr=2**-8))(bowl, tasks[0])
    fall = k * ((start - target).square() - (values(bowl.net.shared_parameters()).detach() - target).square()) / 2
    assert (fall > 0.01).all()
    torch.testing.assert_close(bowl.path, fall, rtol=0.01, atol=0)
    assert (bowl.path > fall).all()


def test_importance_by_hand():
    si = make_bowl(xi=0.1)
    start = values(si.net.shared_parameters()).detach() - torch.tensor([0.3, 0.0, 0.3, 1.0, 0.0, 0.0])
    si.importance.copy_(torch.tensor([0.0, 0.0, 2.0, 1.0, 0.5, 0.0]))
    si.path.copy_(torch.tensor([0.38, 0.2, 0.19, -2.2, -0.02, -1.0]))
    si.consolidate(start)
    # 0.38 / 0.19, 0.2 / 0.1, 2 + 0.19 / 0.19, relu(1 - 2.2 / 1.1), 0.5 - 0.02 / 0.1, relu(-1 / 0.1)
    torch.testing.assert_close(si.importance.tolist(), [2.0, 2.0, 3.0, 0.0, 0.3, 0.0])


def test_the_gradient_of_the_penalty_is_that_of_autograd():
    tasks = toy_tasks(1)
    torch.manual_seed(0)
    net = Network(mlp(tasks[0].shape, widths=(5, 4)), [3], tasks[0].train.inputs(torch.arange(2)), heads="shared")
    si = SI(net, c=0.7).double()
    si.importance.uniform_()
    si.anchor.normal_()
    weights = si.net.shared_parameters()
    plain = [torch.randn_like(p) for p in weights]
    for p, g in zip(weights, plain, strict=True):
        p.grad = g.clone()
    with torch.no_grad():
        si.edit_grads(tasks[0].train.take(torch.arange(2), torch.tensor(0), torch.tensor(1), 2), None)
    penalty = 0.7 * (si.importance * (values(weights) - si.anchor) ** 2).sum()
    expected = [g + p for g, p in zip(plain, torch.autograd.grad(penalty, weights), strict=True)]
    torch.testing.assert_close([p.grad for p in weights], expected)
    assert torch.equal(si.gradient, values(plain)), "the account is kept with the gradient of the plain loss"


def test_which_weights_are_penalised():
    tasks = toy_tasks(2)
    example = tasks[0].train.inputs(torch.arange(2))
    trunk = mlp(tasks[0].shape, widths=(6, 5), dropout=0.0, input_dropout=0.0)  # layers 1 and 3 are linear
    count = sum(p.numel() for p in trunk.parameters())
    assert len(SI(Network(trunk, [3, 3], example)).importance) == count
    assert len(SI(Network(trunk, [3, 3], example, heads="shared")).importance) == count + 5 * 3 + 3
    assert len(SI(Network(trunk, [3, 3], example, freeze="1")).importance) == count - (16 * 6 + 6)


def test_the_account_belongs_to_the_weights_of_the_best_epoch():
    tasks = toy_tasks(1, noise=2.0)
    si = make("si", tasks)
    after: list = []
    fit = Trainer(
        Regime(epochs=12, batch=8, lr=0.3, schedule="constant"),
        progress=lambda _: after.append((si.path.clone(), values(si.net.shared_parameters()).detach().clone())),
    )
    fitted = fit(si, tasks[0])
    assert fitted.best < len(after) - 1, "else there is nothing to see"
    path, weights = after[fitted.best]
    assert torch.equal(si.path, path)
    assert torch.equal(values(si.net.shared_parameters()), weights)
    assert not torch.equal(si.path, after[-1][0])


def test_stiff_springs_hold_what_soft_ones_let_go():
    tasks = toy_tasks(2)
    moved = {}
    for c in (0.0, 3.0):  # lr 2 c Omega stays under 2, the limit of plain SGD
        net = make("sgd", tasks).net
        si = SI(net, c=c, xi=1e-3)
        learn(si, tasks[:1])
        anchor, importance = si.anchor.clone(), si.importance.clone()
        learn(si, tasks[1:])
        moved[c] = (importance * (si.anchor - anchor).square()).sum()
    assert moved[3.0] < moved[0.0] / 2


def test_a_loaded_method_continues_in_the_same_way():
    tasks = toy_tasks(3)
    si, twin = make("si", tasks), make("si", tasks, seed=1)
    learn(si, tasks[:2])
    twin.net.seed = si.net.seed
    twin.load_state_dict(copy.deepcopy(si.state_dict()))
    for one in (si, twin):
        learn(one, tasks[2:])
    assert si.importance.max() > 0
    assert all(torch.equal(a, b) for a, b in zip(si.state_dict().values(), twin.state_dict().values(), strict=True))
    assert torch.equal(logits(si, tasks[0]), logits(twin, tasks[0]))
