"""A trunk cut into stages."""

import copy

import pytest
import torch
from torch import nn

from hatrack import NETWORKS, Network
from hatrack.methods.parts.stages import stages, training_only

SHAPE = (2, 8, 8)


def network(*modules, shape=(16,), classes=(3, 2), **how):
    return Network(nn.Sequential(*modules), list(classes), torch.randn(2, *shape), **how)


def kinds(stage):
    return [type(m).__name__ for m in [*stage.before, stage.layer, *stage.after]]


def test_alexnet_has_five_stages():
    net = Network(NETWORKS["alexnet"]((3, 32, 32)), [2], torch.randn(2, 3, 32, 32))
    block, wide = ["Conv2d", "ReLU", "Dropout", "MaxPool2d"], ["Linear", "ReLU", "Dropout"]
    found = stages(net)
    assert [kinds(stage) for stage in found] == [block, block, [*block, "Flatten"], wide, wide]
    assert [stage.width for stage in found] == [64, 128, 256, 2048, 2048]
    assert [stage.name for stage in found] == ["0", "4", "8", "13", "16"]


def test_stages_hold_the_trunk_s_own_modules_in_its_order():
    act, drop = nn.ReLU(), nn.Dropout(0.5)
    inner = nn.Sequential(act, nn.Sequential(nn.Linear(5, 4), act), drop)
    net = network(nn.Flatten(), drop, nn.Linear(16, 5), inner, nn.Linear(4, 3), nn.Tanh(), shape=(1, 4, 4))
    found = stages(net)
    assert [kinds(s) for s in found] == [
        ["Flatten", "Dropout", "Linear", "ReLU"], ["Linear", "ReLU", "Dropout"], ["Linear", "Tanh"]
    ]  # fmt: skip
    assert [s.name for s in found] == ["2", "3.1.0", "4"]
    assert found[0].layer is net.trunk[2]
    assert found[0].before[1] is found[1].after[1] is drop
    assert found[0].after[0] is found[1].after[0] is act


@pytest.mark.parametrize("mode", [True, False])
def test_looking_changes_nothing(mode):
    net = network(nn.Dropout(0.5), nn.Linear(16, 5), nn.ReLU()).train(mode)
    torch.manual_seed(3)
    before, weights = torch.get_rng_state(), copy.deepcopy(net.state_dict())
    stages(net)[0].fresh(net.example, 3)
    assert {m.training for m in net.trunk.modules()} == {mode}
    assert all(torch.equal(value, weights[key]) for key, value in net.state_dict().items())
    torch.set_rng_state(before)
    drawn = torch.rand(1)
    torch.set_rng_state(before)
    stages(net)
    assert torch.equal(drawn, torch.rand(1))


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        return x + self.layer(x)


class Doubled(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


def tied():
    layer = nn.Linear(16, 16)
    return layer, nn.ReLU(), layer


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([nn.Linear(16, 16), Skip()], r"1 \(Skip\) can't be copied"),
        ([nn.Linear(16, 8), nn.BatchNorm1d(8)], r"1 \(BatchNorm1d\)"),
        ([nn.Linear(16, 8), nn.BatchNorm1d(8, affine=False)], r"1 \(BatchNorm1d\)"),
        ([nn.Linear(16, 8), nn.PReLU()], r"1 \(PReLU\)"),
        ([Doubled(nn.Linear(16, 8))], r"0 \(Doubled\)"),
        ([nn.utils.parametrizations.weight_norm(nn.Linear(16, 8))], r"0 \(ParametrizedLinear\)"),
        ([nn.utils.spectral_norm(nn.Linear(16, 8))], r"0 \(Linear with a computed weight\)"),
        ([nn.Unflatten(1, (4, 4)), nn.Linear(4, 3), nn.Flatten()], r"1 \(Linear on inputs of 3 dimensions\)"),
        ([nn.Unflatten(1, (4, 4)), nn.Conv1d(4, 4, 1, groups=2), nn.Flatten()], r"1 \(a grouped convolution\)"),
        (tied(), r"2 \(Linear that shares its weights with another layer\)"),
        ([nn.ReLU()], "the trunk has no linear or convolutional layer"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_one_line(modules, message):
    with pytest.raises(ValueError, match=message) as caught:
        stages(network(*modules))
    assert "\n" not in str(caught.value)


def test_a_trunk_that_is_not_sequential():
    with pytest.raises(ValueError, match=r"the trunk \(Skip\) .*nn.Sequential"):
        stages(Network(Skip(), [2], torch.zeros(2, 16)))


def test_a_trunk_that_does_more_than_its_modules():
    net = network(nn.Linear(16, 4))
    net.trunk.register_forward_hook(lambda module, args, out: out + 1)
    with pytest.raises(ValueError, match="it computes something that its modules"):
        stages(net)
    assert net.trunk.training


@pytest.mark.parametrize("pattern", ["0", "0.weight", "1"])
def test_frozen_parts_are_refused(pattern):
    with pytest.raises(ValueError, match="parts of the trunk are frozen"):
        stages(network(nn.Linear(16, 4), nn.ReLU(), freeze=pattern))


# New stages


def test_a_fresh_stage_is_of_the_same_kind():
    conv = nn.Conv2d(2, 6, (3, 2), stride=2, padding=(2, 1), dilation=(1, 2), bias=False, padding_mode="reflect")
    net = network(nn.Dropout(0.9), conv, nn.Tanh(), nn.Flatten(), shape=SHAPE)
    stage = stages(net)[0]
    new = stage.fresh(torch.zeros(1, 5, 8, 8), 4)
    assert kinds(new) == kinds(stage)
    assert new.layer.weight.shape == (4, 5, 3, 2)
    for name in ("stride", "padding", "dilation", "padding_mode", "bias"):
        assert getattr(new.layer, name) == getattr(conv, name)
    assert new.after[0] is not stage.after[0]
    x, more = torch.randn(3, 5, 8, 8), torch.randn(3, 4, 5, 4)
    torch.testing.assert_close(new(x, more), torch.tanh(new.layer(x) + more).flatten(1))


def test_a_fresh_stage_finds_its_inputs():
    net = network(nn.Conv2d(2, 6, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 7), nn.ReLU(), shape=SHAPE).double()
    first, second = stages(net)
    new = first.fresh(net.example, 4)
    last = second.fresh(new(net.example), 5)
    assert last.layer.weight.shape == (5, 4 * 9)
    assert last(new(net.example)).dtype == torch.float64


def test_a_width_that_does_not_fit():
    net = network(nn.Linear(16, 8), nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 3, 2), nn.Flatten())
    with pytest.raises(ValueError, match=r"^0 .*7 units"):
        stages(net)[0].fresh(net.example, 7)


# Heads, and what is trained


@pytest.mark.parametrize("init", ["default", "xavier"])
@pytest.mark.parametrize("heads", ["multi", "shared"])
def test_a_head_of_the_usual_width_starts_as_the_network_s(init, heads):
    net = network(nn.Linear(16, 5), init=init, heads=heads)
    for task in range(2):
        own, usual = net.new_head(0 if heads == "shared" else task, features=5), net.heads[0 if heads == "shared" else task]
        assert torch.equal(own.weight, usual.weight)
        assert torch.equal(own.bias, usual.bias)
        assert net.new_head(0 if heads == "shared" else task, features=9).weight.shape == (usual.out_features, 9)


@pytest.mark.parametrize("task", [-1, 2])
def test_a_task_that_is_not_there(task):
    with pytest.raises(IndexError, match=f"no task {task}:.* 2"):
        network(nn.Linear(16, 5)).check_task_id(task)


def test_training_only_some():
    net = network(nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 4))
    net.heads[1].bias.requires_grad_(False)
    before = {name: p.requires_grad for name, p in net.named_parameters()}

    def fail():
        with training_only(net, net.trunk[2].parameters()):
            assert {name for name, p in net.named_parameters() if p.requires_grad} == {"trunk.2.weight", "trunk.2.bias"}
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert {name: p.requires_grad for name, p in net.named_parameters()} == before
