"""Trunks that a method can't learn on are refused when it is made, not after a task, and an error names what takes them."""

import copy
import re
import threading
import warnings
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hatrack import METHODS, Network
from hatrack.seeds import seeded
from tests.helpers.learning import learn, logits
from tests.helpers.toys import toy_tasks


class Sampled(nn.Module):
    """As in a variational autoencoder: training draws from a normal distribution, whose width a layer computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mean, self.width = nn.Linear(16, 12), nn.Linear(12, 8), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.flatten(1)).relu()
        return self.mean(h) + torch.randn(len(x), 8) * self.width(h).exp() if self.training else self.mean(h)


class Twice(nn.Module):
    """Calls a layer a second time in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.flatten(1))
        return self.second((h + self.first(F.dropout(x.flatten(1))) if self.training else h).relu())


class Merged(nn.Module):
    """Two branches, which eval() merges into one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = nn.Linear(16, 12, bias=False), nn.Linear(16, 12, bias=False), nn.Linear(12, 8)
        self.register_buffer("both", torch.zeros(12, 16))

    def train(self, mode: bool = True) -> "Merged":
        if self.training and not mode:
            self.both.copy_((self.one.weight + self.two.weight).detach())
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.last((self.one(x) + self.two(x) if self.training else F.linear(x, self.both)).relu())


class Averaged(nn.Module):
    """A layer beside another, whose weights it follows as a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 12), nn.Linear(12, 8)
        self.slow = copy.deepcopy(self.first).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for slow, fast in zip(self.slow.parameters(), self.first.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
        return self.last((self.first(x.flatten(1)) + self.slow(x.flatten(1))).relu())


class Switched(nn.Sequential):
    """A module with a `train` of its own that computes nothing, and with statistics and dropout."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(16, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 8))

    def train(self, mode: bool = True) -> "Switched":
        return super().train(mode)


@cache
def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.13 says that torch.jit is deprecated
        return torch.jit.script(layer)


def layer(x: Tensor, weight: Tensor) -> Tensor:
    return torch.relu(F.linear(x, weight))


class Scripted(nn.Module):
    """A scripted function that uses a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(16, 12), nn.Linear(12, 12, bias=False), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(scripted()(self.first(x.flatten(1)).relu(), self.second.weight)).relu()


class Flagged(nn.Module):
    """Its switch of mode writes a buffer that does not depend on weights; with a lock it can't be copied."""

    def __init__(self, lock=None) -> None:
        super().__init__()
        self.first, self.lock = nn.Linear(16, 12), lock
        self.register_buffer("on", torch.ones((), dtype=torch.bool))

    def train(self, mode=True):
        super().train(mode)
        self.on.fill_(mode)
        return self

    def forward(self, x):
        return self.first(x.flatten(1)).relu()


def make(kind, name, **options):
    with seeded(0, "early"):
        return METHODS[name](Network(kind(), tasks=toy_tasks(3)), **options)


@pytest.mark.filterwarnings("ignore:.* held whole after the first task", "ignore:task .* finds under 5% free")
def test_a_scripted_function_with_a_weight_is_refused_with_the_option_that_takes_it():
    with pytest.raises(ValueError, match=r"; leave='second.weight.*' freezes") as refused:
        make(Scripted, "hat")
    method, tasks = make(Scripted, "hat", leave=re.search("leave='(.*?)'", str(refused.value))[1]), toy_tasks(3)
    learn(method, tasks[:1])
    before = logits(method, tasks[0])
    learn(method, tasks[1:])
    assert torch.equal(before, logits(method, tasks[0]))


@pytest.mark.parametrize("kind", [Sampled, Twice])
def test_what_training_alone_computes_is_refused_by_hat_when_it_is_made(kind):
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r"in training mode the trunk calls .*; pmask and packnet"):
        make(kind, "hat")


@pytest.mark.parametrize("name", ["hat", "pmask", "packnet", "lora"])
def test_weights_that_eval_merges_are_refused(name):
    with pytest.raises(ValueError, match=r"computes 'both' .* eval\(\) is called, .* the method independent"):
        make(Merged, name)


@pytest.mark.parametrize("name", ["lora", "frozen"])
def test_moving_averages_are_refused_where_the_trunk_stays_as_it_is(name):
    with pytest.raises(ValueError, match=rf"changes 'slow.bias', .* but {name} .*; hat, pmask, packnet and independent"):
        make(Averaged, name)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, name) for kind in (Sampled, Twice) for name in ("pmask", "packnet")),
        (Merged, "independent"),
        *((Averaged, name) for name in ("hat", "pmask", "packnet", "independent")),
        *((Switched, name) for name in ("hat", "pmask", "packnet", "lora", "frozen")),
        *((Flagged, name) for name in ("hat", "pmask", "packnet", "lora")),
        (lambda: Flagged(threading.Lock()), "lora"),
    ],
)
@pytest.mark.filterwarnings("ignore:task .* finds under 5% free")
def test_the_methods_that_the_errors_name_learn_three_tasks(kind, name):
    tasks, method = toy_tasks(3), make(kind, name)
    learn(method, tasks[:1])
    before = logits(method, tasks[0])
    learn(method, tasks[1:])
    assert torch.equal(before, logits(method, tasks[0]))
