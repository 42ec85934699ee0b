"""Gates that are folded into norms: the features and gradients of gates that multiply, to rounding, in fewer operations."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hatrack.networks.resnet import resnet18
from hatrack.tracing.folded import LastPass
from hatrack.tracing.units import Units


class Normed(nn.Module):
    """Norms of all kinds, with and without scales, and a block that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(3 if k == 0 else 6, 6, 3, padding=1) for k in range(5)])
        self.norms = nn.ModuleList([
            nn.BatchNorm2d(6), nn.GroupNorm(2, 6), nn.InstanceNorm2d(6, affine=True), nn.BatchNorm2d(6, affine=False),
            nn.BatchNorm2d(6),
        ])  # fmt: skip
        self.last, self.layer_norm = nn.Linear(6, 5), nn.LayerNorm(5)
        self.skip = False

    def forward(self, x: Tensor) -> Tensor:
        for k, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            if k == 4 and self.skip:
                continue
            x = torch.relu(norm(conv(x)))
        return self.layer_norm(self.last(x.mean((2, 3))))


def setup(trunk: nn.Module, pixels: int = 8) -> tuple[Units, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, pixels, pixels, generator=draw, dtype=torch.float64)
    trunk = trunk.double().train()
    with torch.no_grad():
        for parameter in trunk.parameters():  # no scale of 1 and shift of 0
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    units = Units(trunk, x[:2])
    return units, x, torch.rand(units.count, generator=draw, dtype=torch.float64, requires_grad=True)


def gradients(features: Tensor, gates: Tensor, trunk: nn.Module) -> list[Tensor | None]:
    loss = (features * torch.linspace(-1, 1, features.numel(), dtype=features.dtype).view_as(features)).square().sum()
    return list(torch.autograd.grad(loss, [gates, *trunk.parameters()], allow_unused=True))


def alike(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    return all(
        a is b is None or (a is not None and b is not None and torch.allclose(a, b, rtol=1e-9, atol=1e-9))
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("build", [Normed, lambda: resnet18((3, 8, 8), width=3)])
def test_folded_gates_are_gates(build, together):
    units, x, gates = setup(build())
    plain = units.run(x, gates)
    expected = gradients(plain, gates, units.trunk)
    last = LastPass()
    last.together = together
    for _ in range(2):  # the second pass folds what the first one called
        features = units.run_folded(x, gates, {}, last)
        assert torch.allclose(features, plain, rtol=1e-10, atol=1e-10)
        assert alike(gradients(features, gates, units.trunk), expected)
        last.end_step()
    assert last.norms
    assert not alike(gradients(units.run_folded(x, 2 * gates, {}, last), gates, units.trunk), expected)  # the test can fail


def test_a_norm_that_a_pass_leaves_out_has_no_gradient():
    units, x, gates = setup(Normed())
    last = LastPass()
    units.run_folded(x, gates, {}, last)
    last.end_step()
    units.trunk.skip = True
    expected = gradients(units.run(x, gates), gates, units.trunk)
    found = gradients(units.run_folded(x, gates, {}, last), gates, units.trunk)
    assert alike(found, expected)
    assert sum(grad is None for grad in found) == 4  # a convolution and a norm
    units.trunk.skip = False
    assert alike(
        gradients(units.run_folded(x, gates, {}, last), gates, units.trunk),
        gradients(units.run(x, gates), gates, units.trunk),
    )


def test_second_derivatives():
    units, x, gates = setup(Normed())

    def penalty(features: Tensor) -> list[Tensor]:
        first = torch.autograd.grad(features.square().sum(), gates, create_graph=True)[0]
        weights = [p for name, p in units.trunk.named_parameters() if name.startswith("norms.0")]
        return list(torch.autograd.grad(first.square().sum(), [gates, *weights]))

    last = LastPass()
    units.run_folded(x, gates, {}, last)
    last.end_step()
    assert alike(penalty(units.run_folded(x, gates, {}, last)), penalty(units.run(x, gates)))


def test_other_tensors_in_place_of_those_of_the_last_pass():
    units, x, gates = setup(Normed())
    last = LastPass()
    units.run_folded(x, gates, {}, last)
    last.end_step()
    norm = units.trunk.norms[0]
    norm.weight = nn.Parameter(norm.weight.detach() * 3)
    units.trunk.norms[4].running_mean = units.trunk.norms[4].running_mean.clone()
    assert torch.allclose(units.run_folded(x, gates, {}, last), units.run(x, gates), rtol=1e-10)


class Scaled(nn.Module):
    """Layers that are called with a computed weight in place of their own, which has its name for as long as the call."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.func.functional_call(self.conv, {"weight": 1.5 * self.conv.weight}, (x,))
        scaled = torch.func.functional_call(self.norm, {"weight": 1.5 * self.norm.weight}, (x,))
        return torch.relu(self.last(torch.relu(scaled).mean((2, 3))))


def test_tensors_that_the_trunk_exchanges_within_a_pass():
    units, x, gates = setup(Scaled())
    last = LastPass()
    plain = units.run(x, gates)
    expected = gradients(plain, gates, units.trunk)
    for _ in range(3):
        features = units.run_folded(x, gates, {}, last)
        assert torch.allclose(features, plain, rtol=1e-10, atol=1e-10)
        assert alike(gradients(features, gates, units.trunk), expected)
        last.end_step()


class Odd(nn.Module):
    """A norm that is called twice, one whose result has two readers, one over a dimension as long as its channels are many,
    scales that two norms share, channels without variance, and a scale that the forward pass itself keeps in a range."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Conv2d(8, 8, 1),
        )
        self.twice, self.same, self.rows, self.kept = (
            nn.BatchNorm2d(8),
            nn.BatchNorm2d(8),
            nn.LayerNorm(8),
            nn.GroupNorm(2, 8),
        )
        self.same.weight = self.twice.weight
        self.last, self.narrow = nn.Linear(8, 5), nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.weight[:2] = 0  # these channels have no variance
            self.kept.weight.clamp_(max=0.9)
        x = torch.relu(self.twice(self.first(x)))
        x = x + torch.relu(self.twice(self.second(x)))  # a residual connection
        x = self.same(self.third(self.rows(x))) + torch.tanh(x)
        return self.narrow(self.last(torch.relu(self.kept(x)).mean((2, 3))))


@pytest.mark.parametrize("training", [True, False])
def test_odd_norms_and_closed_gates(training):
    units, x, gates = setup(Odd())
    units.trunk.train(training)
    with torch.no_grad():
        gates[::3], gates[1::7] = 0, 1
    last = LastPass()
    for _ in range(3):
        with torch.no_grad():
            units.trunk.kept.weight.fill_(2)  # as a step of an optimizer might leave it
        expected = gradients(units.run(x, gates), gates, units.trunk)
        with torch.no_grad():
            units.trunk.kept.weight.fill_(2)
        assert alike(gradients(units.run_folded(x, gates, {}, last), gates, units.trunk), expected)
        last.end_step()
    assert {name for name, _ in last.norms} >= {"twice.weight", "narrow.weight"}


class Counted(TorchDispatchMode):
    """Counts operations, and those whose result is as large as activations."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.all, self.large = size, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = not func.is_view and isinstance(out, Tensor)
        self.all += made
        self.large += made and out.numel() >= self.size
        return out


def test_the_gates_of_norms_cost_no_operation_on_activations():
    units, x, gates = setup(resnet18((3, 32, 32), width=3), pixels=32)
    size, last, counts = len(x) * 24 * 4 * 4, LastPass(), {}  # the smallest activations: 24 channels of 4x4 pixels
    assert units.count < size
    units.run_folded(x, gates, {}, last)
    last.end_step()
    for name, run in {
        "bare": lambda: units.trunk(x),
        "folded": lambda: units.run_folded(x, gates, {}, last),
        "plain": lambda: units.run(x, gates),
    }.items():
        units.trunk.zero_grad()
        with Counted(size) as counted:
            run().sum().backward()
        counts[name] = counted
    assert counts["folded"].large <= counts["bare"].large
    assert counts["plain"].large >= counts["bare"].large + 40
    assert counts["folded"].all <= counts["bare"].all + 60 < counts["plain"].all
