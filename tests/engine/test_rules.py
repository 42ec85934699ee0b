"""The rule of the step, broken on purpose in every way that the check has to find."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from hatrack import Method, Network, Regime, Trainer
from hatrack.engine.rules import RuleBroken, watch_step
from hatrack.networks.mlp import mlp
from tests.helpers.toys import toy_tasks


class IfOnATensor(Method):
    def loss(self, batch):
        loss = super().loss(batch)
        return loss * 2 if loss > 0.5 else loss


class Item(Method):
    def edit_grads(self, batch, aux):
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(batch.step.item())


class ReboundParameter(Method):
    def constrain(self):
        head = self.net.heads[0]
        head.weight = nn.Parameter(head.weight.detach() * 0.99)


class ReboundData(Method):
    def constrain(self):
        self.net.heads[0].weight.data = self.net.heads[0].weight.data * 0.99


class ReboundBuffer(Method):
    def __init__(self, net):
        super().__init__(net)
        self.register_buffer("count", torch.zeros(()))

    def constrain(self):
        self.count = self.count + 1


class PythonCounter(Method):
    count = 0

    def constrain(self):
        self.count += 1


class TensorFromPython(Method):
    def loss(self, batch):
        return super().loss(batch) * torch.tensor(2.0)


class MaskAsIndex(Method):
    def loss(self, batch):
        return super().loss(batch) + batch.x[batch.x > 0].mean()


class Nonzero(Method):
    def loss(self, batch):
        return super().loss(batch) + batch.x.nonzero().float().mean()


class Numpy(Method):
    def loss(self, batch):
        return super().loss(batch) * float(batch.y.numpy().mean())


class ToList(Method):
    def edit_grads(self, batch, aux):
        batch.y.tolist()


class HiddenCounter(Method):
    def __init__(self, net):
        super().__init__(net)
        self._seen = {"steps": 0}

    def constrain(self):
        self._seen["steps"] += 1


class Growing(Method):
    def __init__(self, net):
        super().__init__(net)
        self.losses = []

    def loss(self, batch):
        self.losses.append(0)
        return super().loss(batch)


class Counts(Method):
    def loss(self, batch):
        return super().loss(batch) + 0 * batch.y.bincount().sum()


class Seeds(Method):
    def loss(self, batch):
        torch.manual_seed(1)
        return super().loss(batch)


class SetsBack(Method):
    """As checkpointing of activations does it, to draw the same dropout again."""

    def loss(self, batch):
        state = torch.get_rng_state()
        torch.rand(3)
        torch.random.set_rng_state(state)
        return super().loss(batch)


class PythonRandom(Method):
    def loss(self, batch):
        return super().loss(batch) * (1 if random.random() < 0.5 else 2)


class NumpyRandom(Method):
    def loss(self, batch):
        return super().loss(batch) * float(np.random.rand())


class Helper:
    steps = 0


class CounterElsewhere(Method):
    def __init__(self, net):
        super().__init__(net)
        self.helper = Helper()

    def constrain(self):
        self.helper.steps += 1


class Harmless(Method):
    """Everything here is allowed: factories on the device, where, in-place changes, a choice by the task."""

    def __init__(self, net):
        super().__init__(net)
        self.register_buffer("count", torch.zeros(()))

    def loss(self, batch):
        scale = 2 if batch.task == 0 else 1
        return super().loss(batch) * scale + torch.where(batch.x > 0, batch.x, 0).mean() * torch.zeros(())

    def constrain(self):
        self.count += 1
        self.net.heads[0].weight.mul_(0.99)


def train(kind: type[Method], watch: bool) -> None:
    tasks = toy_tasks(1)
    net = Network(mlp(tasks[0].shape, widths=(8,)), [3], tasks[0].train.inputs(torch.arange(2)))
    kind(net).learn(tasks[0], Trainer(Regime(epochs=1, batch=16), watch=watch))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (IfOnATensor, "reads a tensor's value"),
        (Item, "reads a tensor's value"),
        (ReboundParameter, "rebinds .* net.heads.0.weight"),
        (ReboundData, "rebinds .* net.heads.0.weight"),
        (ReboundBuffer, "rebinds .* count"),
        (PythonCounter, "rebinds .* count"),
        (TensorFromPython, "makes a tensor from Python data"),
        (MaskAsIndex, "mask as an index"),
        (Nonzero, "shape depends on values"),
        (Numpy, r"\.numpy\(\)"),
        (HiddenCounter, "rebinds .* _seen"),
        (Growing, "rebinds .* losses"),
        (Counts, "bincount"),
        (ToList, r"\.tolist\(\)"),
        (Seeds, "sets a generator"),
        (SetsBack, "sets a generator"),
        (PythonRandom, "from Python or numpy"),
        (NumpyRandom, "from Python or numpy"),
        (CounterElsewhere, "rebinds .* helper"),
    ],
)
def test_a_broken_rule_is_caught(kind, said):
    train(kind, watch=False)  # without the check it runs
    with pytest.raises(RuleBroken, match=said):
        train(kind, watch=True)


def test_what_is_allowed_is_not_caught():
    train(Harmless, watch=True)


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_what_was_drawn_within_the_check_is_drawn_again(draw):
    with pytest.raises(RuleBroken, match="from Python or numpy"), watch_step(nn.Module()):
        drawn = draw()
    assert draw() == drawn


def test_generators_are_restored_after_another_error_too():
    def fails():
        random.random()
        raise ZeroDivisionError

    random.seed(0)
    with pytest.raises(ZeroDivisionError), watch_step(nn.Module()):
        fails()
    drawn = random.random()
    random.seed(0)
    assert random.random() == drawn
