"""Capacity and reuse, against plain loops over the masks; the forecast against what then fits; the curve over epochs."""

import itertools
import math

import pytest
import torch
from torch import nn

from hatrack import HAT, METHODS, Network, Regime, Trainer, capacity
from hatrack.inspection.capacity import Capacity
from hatrack.inspection.layers import layer_titles
from hatrack.inspection.measuring import CapacityCurve
from tests.helpers.learning import FunctionFit, every_method, learn, make
from tests.helpers.toys import toy_tasks

pytestmark = pytest.mark.filterwarnings("ignore:task .* finds under 5% free")
MASKED = ["hat", "pmask", "packnet"]


class TriedError(Exception):
    pass


def immovable(method, task, names):
    """The share of these weights that a step of the next task can't move: all are moved, and the method restores some."""
    found = []

    def fit(learner, *_, **__):
        weights = [learner.net.trunk.get_parameter(name) for name in names]
        before = [weight.detach().clone() for weight in weights]
        with torch.no_grad():
            torch._foreach_add_(weights, 1.0)
            learner.constrain()
        same = sum(int((old == new).sum()) for old, new in zip(before, weights, strict=True))
        found.append(same / sum(weight.numel() for weight in weights))
        raise TriedError

    with pytest.raises(TriedError):
        method.learn(task, FunctionFit(fit))
    return found[0]


@pytest.mark.parametrize("name", ["hat", "pmask"])
def test_what_is_frozen_is_what_the_next_task_cannot_move(name):
    tasks = toy_tasks(4)
    method, tried = make(name, tasks), []
    for task, following in itertools.pairwise(tasks):
        learn(method, [task])
        found = capacity(method)
        tried.append(immovable(method, following, [layer.name for layer in found.layers]))
    assert found.frozen == pytest.approx(tried)
    assert found.free == pytest.approx(1 - tried[-1])


def test_hat_freezes_more_by_the_rule_of_its_paper():
    """Eq. 2, with the largest gates of all tasks so far, for two linear layers; the other rule freezes what a task uses."""
    tasks = toy_tasks(3)
    method = make("hat", tasks)
    learn(method, tasks)
    found, gates = capacity(method), [method.masks(task) for task in range(3)]
    inputs, expected = tasks[0].train.inputs(torch.arange(1)).numel(), []
    for t in range(3):
        layers = zip(*(one.values() for one in gates[: t + 1]), strict=True)
        first, second = (torch.stack(layer).any(0).float() for layer in layers)
        count = inputs * first.sum() + torch.minimum(second[:, None], first[None]).sum()
        expected.append(float(count) / (inputs * len(first) + len(first) * len(second)))
    assert found.frozen == pytest.approx(expected)
    assert found.frozen[0] == found.used[0]
    assert found.frozen[2] > found.used[2]
    exact = HAT(make("hat", tasks).net, protect="exact")
    learn(exact, tasks)
    assert capacity(exact).frozen == capacity(exact).used


@pytest.mark.parametrize("name", MASKED)
def test_the_numbers_are_those_of_a_plain_loop(name):
    tasks = toy_tasks(3)
    method = make(name, tasks)
    learn(method, tasks)
    found = capacity(method)
    masks = [method.weight_masks(t) for t in range(3)]
    counts, users, both, used = [], [], [[0] * 3 for _ in range(3)], [0] * 3
    for layer in found.layers:
        flat = [mask[layer.name].flatten().tolist() for mask in masks]
        assert len(flat[0]) == layer.weights
        counts.append(layer.weights)
        by_count = [0] * 4
        for bits in zip(*flat, strict=True):
            by_count[sum(bits)] += 1
            for i in range(3):
                used[i] += any(bits[: i + 1])
                for j in range(3):
                    both[i][j] += bits[i] and bits[j]
        assert layer.shared_by == by_count
        users.append(by_count)
        assert layer.own == pytest.approx([sum(row) / len(row) for row in flat])
        assert [a + b for a, b in zip(layer.new, layer.reused, strict=True)] == pytest.approx(layer.own)
    assert found.tasks == [task.name for task in tasks]
    assert found.used == pytest.approx([n / sum(counts) for n in used])
    assert found.own == pytest.approx([both[i][i] / sum(counts) for i in range(3)])
    assert found.reuse == [pytest.approx([both[i][j] / both[i][i] for j in range(3)]) for i in range(3)]
    assert found.shared_by == [sum(row) for row in zip(*users, strict=True)]
    assert (found.frozen == found.used) == (name != "hat")
    if name != "hat":
        assert found.free == pytest.approx(found.shared_by[0] / sum(counts))
    assert Capacity.from_dict(found.to_dict()) == found


def test_a_weight_of_hat_is_used_if_both_its_units_are():
    """The definition of the paper, written out for two linear layers: the least of the two gates."""
    tasks = toy_tasks(2)
    method = make("hat", tasks)
    learn(method, tasks)
    for task in range(2):
        gates, weights = method.masks(task), method.weight_masks(task)
        first, second = gates.values()
        names = [name for name, mask in weights.items() if mask.dim() == 2]
        inputs = weights[names[0]].shape[1]
        assert weights[names[0]].equal(first[:, None].expand(-1, inputs))
        assert weights[names[1]].equal(second[:, None] & first[None])


@every_method
def test_other_methods_have_no_masks(name):
    tasks = toy_tasks(1)
    method = make(name, tasks)
    with pytest.raises(ValueError, match="has not been learned; learned are none"):
        method.masks(0)
    learn(method, tasks)
    assert bool(method.masks(0)) == (name in MASKED)
    assert bool(capacity(method).layers) == (name in MASKED)
    with pytest.raises(ValueError, match="task 1 has not been learned; learned are 0"):
        method.masks(1)


def test_the_forecast_of_packnet_is_what_then_fits():
    """Every task keeps a quarter of what it finds free, so that 0.75^n is free after n tasks and the forecast exact."""
    tasks = toy_tasks(11)
    method, free = make("packnet", tasks), []
    for task in tasks:
        method.learn(task, Trainer(Regime(epochs=1, batch=64)))
        free.append(capacity(method))
    fits = sum(found.free > 0.05 for found in free)
    assert fits == 10
    for learned, found in enumerate(free[:-1], 1):
        assert math.floor(found.forecast) == fits - learned
    assert free[-1].forecast == 0


def test_the_forecast_without_tasks_and_without_growth():
    assert capacity(make("hat", toy_tasks(1))).forecast == math.inf
    assert Capacity(["a", "b"], used=[0.5, 0.5]).forecast == math.inf
    assert Capacity(["a", "b"], used=[0.5, 0.97]).forecast == 0
    assert Capacity(["a"], used=[0.5]).forecast == pytest.approx(math.log(0.1) / math.log(0.5))


@pytest.mark.parametrize("name", MASKED)
def test_the_curve_ends_at_the_capacity_after_the_task(name):
    tasks = toy_tasks(2)
    method, fit = make(name, tasks), Trainer(Regime(epochs=3, batch=16, lr=0.1, patience=3))
    fit.after_epoch = CapacityCurve()
    for task in tasks:
        method.learn(task, fit)
        result = fit.fits[-1]
        assert len(result.used) == len(result.epochs)
        if name != "packnet" or method.options["retrain"]:  # pruned after the last epoch otherwise
            assert capacity(method).frozen[-1] in [pytest.approx(share) for share in result.used]


@pytest.mark.parametrize("name", MASKED)
def test_layers_that_the_user_froze_are_not_counted(name):
    tasks = toy_tasks(1)
    trunk = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU())
    method = METHODS[name](Network(trunk, tasks=tasks, freeze="1"))
    learn(method, tasks)
    found = capacity(method)
    assert [layer.name.removesuffix(".weight") for layer in found.layers] == ["3"]
    assert 0 < found.used[0] < 1


@pytest.mark.parametrize("name", MASKED)
def test_a_number_that_no_task_has_is_refused(name):
    method = make(name, toy_tasks(1))
    for wrong in (-1, 1):
        with pytest.raises(IndexError, match=f"no task {wrong}"):
            method.weight_masks(wrong)


def test_a_layer_that_is_called_twice_and_convolutions_have_titles():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.again = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
            self.out = nn.Linear(4, 6)

        def forward(self, x):
            x = torch.relu(self.again(torch.relu(self.again(torch.relu(self.conv(x))))))
            return torch.relu(self.out(x.mean((2, 3))))

    tasks = toy_tasks(2)
    method = HAT(Network(Twice(), tasks=tasks))
    learn(method, tasks)
    titles = {"conv": "conv 1, 4 filters", "again": "conv 2, 4 filters", "out": "linear 1, 6 units"}
    assert layer_titles(method.net.trunk) == titles
    assert [layer.title for layer in capacity(method).layers] == list(titles.values())
