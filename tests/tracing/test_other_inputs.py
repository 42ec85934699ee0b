"""What practitioners did to the promise: blocks listed twice, inputs of other shapes, hidden reads, weights in slices."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hatrack import METHODS, Network, Regime, Trainer
from hatrack.tracing.exchange import functional_call
from hatrack.tracing.units import Units
from tests.helpers.learning import logits
from tests.helpers.nets import Lambda
from tests.helpers.toys import toy_tasks

WIDE = torch.randn(2, 12, generator=torch.Generator().manual_seed(0))


def twice(x_size=16):
    block = nn.Sequential(nn.Linear(x_size, x_size), nn.BatchNorm1d(x_size), nn.ReLU())
    return nn.Sequential(block, block)


def test_a_module_that_is_registered_twice_is_restored():
    trunk = twice(4)
    before = dict(trunk.named_parameters())
    x = torch.randn(3, 4)
    expected = copy.deepcopy(trunk).requires_grad_(False)
    expected[0][0].weight.mul_(2)
    found = functional_call(trunk.eval(), {"0.0.weight": 2 * before["0.0.weight"]}, (x,))
    torch.testing.assert_close(found, expected.eval()(x))
    assert all(p is before[name] for name, p in trunk.named_parameters())
    with pytest.raises(KeyError, match="nothing"):
        functional_call(trunk, {"nothing": x}, (x,))


@pytest.mark.parametrize("name", ["hat", "pmask", "packnet"])
def test_a_block_that_is_listed_twice_forgets_nothing(name):
    tasks = toy_tasks(3, shape=(16,))
    method = METHODS[name](Network(twice(), tasks=tasks))
    fit = Trainer(Regime(epochs=4, batch=16, optimizer="adamw", lr=0.01))
    method.learn(tasks[0], fit)
    first = logits(method, tasks[0])
    logits(method, tasks[1])
    assert torch.equal(logits(method, tasks[0]), first), "asking another task changes nothing"
    for task in tasks[1:]:
        method.learn(task, fit)
    assert torch.equal(logits(method, tasks[0]), first)


def test_inputs_of_another_rank_are_refused():
    """Their channels are elsewhere."""
    units = Units(nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12)), WIDE)
    gates = torch.ones(units.count, dtype=torch.bool)
    assert units.run(WIDE, gates).shape == (2, 12)
    with pytest.raises(ValueError, match="2 dimensions, as the example has, not 3"):
        units.run(torch.randn(2, 12, 12), gates)


OTHERWISE = {  # a trunk and a longer input, for which it makes the same calls but reads weights in another way
    "padded": (
        Lambda(
            lambda own, x: own.b(F.pad(own.a(x[:, :, None]), (0, 0, 0, 16 - x.shape[1])).flatten(1)),
            a=nn.Linear(1, 3),
            b=nn.Linear(48, 4),
        ),
        13,
    ),
    "another order": (
        Lambda(
            lambda own, x: own.b(own.a(x[:, :8])) if x.shape[1] < 13 else own.a(own.b(x[:, :8])),
            a=nn.Linear(8, 8),
            b=nn.Linear(8, 8),
        ),
        14,
    ),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_inputs_of_another_shape_that_use_weights_otherwise_are_refused(name):
    trunk, longer = OTHERWISE[name]
    units = Units(trunk, WIDE)
    gates = torch.ones(units.count, dtype=torch.bool)
    with pytest.raises(ValueError, match=rf"inputs of shape \({longer},\).*example of the largest shape"):
        units.run(torch.randn(2, longer), gates)


def test_inputs_of_another_shape_that_use_weights_alike_are_taken():
    trunk = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4))
    units = Units(trunk, torch.randn(2, 1, 8, 8))
    assert units.run(torch.randn(2, 1, 11, 9), torch.ones(units.count, dtype=torch.bool)).shape == (2, 4)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: np.asarray(x).sum(),
        lambda x: np.from_dlpack(x).sum(),
        lambda x: torch.equal(x, x),
        str,
        lambda x: f"{x.sum()}",
    ],
    ids=["asarray", "dlpack", "equal", "str", "format"],
)
def test_reads_of_values_are_seen(read):
    def forward(own, x):
        h = own.a(x)
        read(h.detach())
        return own.b(h)

    assert Units(Lambda(forward, a=nn.Linear(12, 4), b=nn.Linear(4, 3)), WIDE).reads


def test_a_sum_of_nothing_on_the_example():
    units = Units(Lambda(lambda own, x: own.a(x + x[:, :-12].sum(1, keepdim=True)), a=nn.Linear(12, 4)), WIDE)
    assert units.count == 4


def test_weights_of_which_most_are_never_used_are_a_warning():
    tasks = toy_tasks(2, shape=(12,))
    trunk = Lambda(lambda own, x: own.b(x @ own.table[:, :4]), table=nn.Parameter(torch.randn(12, 16)), b=nn.Linear(4, 3))
    with pytest.warns(UserWarning, match=r"held whole after the first task: table \(75% of it\)"):
        METHODS["hat"](Network(trunk, tasks=tasks))


def test_a_division_by_closed_units_is_a_warning():
    """0 / 0: training would end in NaN, and the learning rate would be blamed."""

    def forward(own, x):
        k = F.softplus(own.a(x))
        return own.b(x)[:, :4] / k

    with pytest.warns(UserWarning, match="divides by units"):
        Units(Lambda(forward, a=nn.Linear(12, 4), b=nn.Linear(12, 4)), WIDE)
