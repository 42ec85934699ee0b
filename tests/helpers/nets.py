"""Test networks: small ones around one operation, random ones, and a check of their units."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from hatrack.seeds import seeded
from hatrack.tracing.units import Units


class Lambda(nn.Module):
    """A module made of a function and the modules or parameters that it uses.

    Example: `Lambda(lambda own, x: own.layer(x).exp(), layer=nn.Linear(3, 4))`.
    """

    def __init__(self, function: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def as_module(function: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a module without parameters that applies a function."""
    return Lambda(lambda own, x: function(x))


def between_layers(operation: nn.Module, channels: int = 4) -> nn.Module:
    """Return a trunk: a convolution to units 0 to 3, the operation, and a convolution of its `channels` to units 4 to 6."""
    parts = {"first": nn.Conv2d(2, 4, 3, padding=1), "operation": operation, "second": nn.Conv2d(channels, 3, 1)}
    return Lambda(lambda own, x: own.second(own.operation(own.first(x))).flatten(1), **parts)


# A check of units


def check_units(trunk: nn.Module, x: Tensor, **options: Any) -> Units:
    """Check that weights which random masks leave free have no gradient and no influence on the features, and others do.

    All outputs are compared bit for bit.

    Args:
        trunk: the network to check.
        x: a batch of inputs; the first two are the example.
        options: further arguments of `Units`.

    Returns:
        The units, for further checks.
    """
    trunk.eval()
    units = Units(trunk, x[:2], **options)
    with torch.no_grad():
        assert torch.equal(units.run(x, torch.ones(units.count, dtype=torch.bool)), trunk(x)), (
            "open gates change the features"
        )
    draw = torch.Generator().manual_seed(units.count)
    varied = influenced = 0
    for share in (0.3, 0.5, 0.7, 0.8, 0.9, 0.9):
        gates = torch.rand(units.count, generator=draw) < share
        features = units.run(x, gates)
        varied += (features.std(0) > 0).any().item()
        influenced += _check_masks(units, x, gates, features, draw)
    assert varied, "the features are constant, which proves nothing"
    assert influenced, "no frozen weight influences the features"
    return units


def _check_masks(units: Units, x: Tensor, gates: Tensor, features: Tensor, draw: torch.Generator) -> bool:
    """Check that free weights have no influence; return whether changing frozen weights with a gradient has one."""
    trunk = {name: p for name, p in units.trunk.named_parameters() if name in units.traced}
    frozen = {name: mask > 0 for name, mask in units.weight_masks(gates.float()).items() if name in trunk}
    grads = dict.fromkeys(trunk)
    if features.requires_grad:
        total = (features * torch.randn(features.shape, generator=draw).to(features)).sum()
        found = torch.autograd.grad(total, list(trunk.values()), allow_unused=True)
        grads = dict(zip(trunk, found, strict=True))
    with_grad = {name: torch.zeros_like(frozen[name]) if g is None else g != 0 for name, g in grads.items()}
    for name in trunk:
        assert not (with_grad[name] & ~frozen[name]).any(), f"a free weight of {name} has a gradient"

    def after(change: Callable[[Tensor], Tensor], where: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            tensors = {name: torch.where(where[name], change(p), p) for name, p in trunk.items()}
            for name, p in trunk.items():
                tensors[name].requires_grad_(p.requires_grad)  # torch chooses kernels by it
            return units.run(x, gates, tensors)

    def noise(t: Tensor) -> Tensor:
        return torch.randn(t.shape, generator=draw).to(t)

    free = {name: ~mask for name, mask in frozen.items()}
    with torch.no_grad():
        before = units.run(x, gates)
    for change in (noise, lambda t: -3 * t, lambda t: 1e30 * noise(t).sign()):
        assert torch.equal(before, after(change, free)), "changing free weights changes the features"
    return not torch.equal(before, after(lambda t: t + noise(t), with_grad))


def input_dependencies(units: Units, layer: str) -> list[set[int] | str]:
    """Return the dependency set of every input of a layer, found through the masks of its first unit's weights.

    "always active" stands for an input whose weight is frozen even if no other unit is used.
    """
    first = units.layers[layer].start

    def frozen(*used: int) -> list[bool]:
        values = torch.zeros(units.count)
        values[list(used)] = 1
        row = units.weight_masks(values)[f"{layer}.weight"][0]
        return (row.reshape(len(row), -1)[:, 0] > 0).tolist()

    alone = frozen(first)
    pairs = {unit: frozen(first, unit) for unit in range(units.count) if unit != first}
    return ["always active" if on else {unit for unit, both in pairs.items() if both[k]} for k, on in enumerate(alone)]


# Random networks

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "none": lambda channels: nn.Identity(),
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(2, channels),
    "instance": lambda channels: nn.InstanceNorm2d(channels, affine=True),
    "layer": lambda channels: nn.Sequential(CHANNELS_LAST, nn.LayerNorm(channels), CHANNELS_FIRST),
    "rms": lambda channels: nn.Sequential(CHANNELS_LAST, nn.RMSNorm(channels), CHANNELS_FIRST),
}
ACTIVATIONS = ("relu", "leaky_relu", "gelu", "silu", "tanh", "elu", "hardswish", "sigmoid", "softplus")
CHANNELS_FIRST, CHANNELS_LAST = as_module(lambda x: x.movedim(-1, 1)), as_module(lambda x: x.movedim(1, -1))


@dataclass(frozen=True)
class Plan:
    """A random network for images of 3x8x8: a sequence of blocks with one kind of norm and activation."""

    blocks: tuple[str, ...]
    norm: str
    activation: str
    width: int
    tail: str
    seed: int

    def build(self) -> nn.Module:
        """Return the network, with weights drawn from the plan's seed."""
        with seeded(self.seed, "random network"):
            first = Lambda(BLOCKS["plain"], **self.parts(nn.Conv2d(3, self.width, 3, padding=1)))
            return nn.Sequential(first, *(self.block(kind) for kind in self.blocks), self.end())

    def parts(self, conv: nn.Module, inner: nn.Module | None = None, **others: Any) -> dict[str, Any]:
        """Return what the functions in BLOCKS use: two convolutions, three norms, and an activation."""
        width = self.width
        inner = inner or nn.Conv2d(width, width, 3, padding=2, dilation=2, bias=self.norm == "none")
        norms = {f"norm{k}": NORMS[self.norm](width) for k in range(3)}
        return {"conv": conv, "inner": inner, "act": getattr(F, self.activation), **norms, **others}

    def block(self, kind: str) -> nn.Module:
        """Return a block of one of the kinds in BLOCKS."""
        width = self.width
        conv = nn.Conv2d(width, width, 3, padding=1)
        match kind:
            case "strided":
                parts = self.parts(nn.Conv2d(width, width, 3, stride=2, padding=1))
            case "projected":
                parts = self.parts(conv, side=nn.Conv2d(width, width, 1, bias=False))
            case "padded":
                parts = self.parts(nn.Conv2d(width, width - 2, 3, padding=1))
            case "concatenated":
                parts = self.parts(conv, nn.Conv2d(2 * width, width, 1))
            case "branched":
                parts = self.parts(conv, nn.Conv2d(2 * width, width, 1), side=nn.Conv2d(width, width, 1, bias=False))
            case "depthwise":
                parts = self.parts(nn.Conv2d(width, width, 3, padding=1, groups=width), nn.Conv2d(width, width, 1))
            case "shuffled":
                parts = self.parts(nn.Conv2d(width, width, 3, padding=1, groups=2), nn.Conv2d(width, width, 1, groups=2))
            case "excited":
                parts = self.parts(conv, down=nn.Linear(width, 4), up=nn.Linear(4, width))
            case "halved":
                parts = self.parts(nn.Conv2d(width // 2, width // 2, 3, padding=1))
            case "transposed":
                parts = self.parts(nn.ConvTranspose2d(width, width, 2, stride=2, groups=2))
            case _:
                parts = self.parts(conv)
        return Lambda(BLOCKS[kind], **parts)

    def end(self) -> nn.Module:
        """Return the last module, which maps images to features."""
        return Lambda(TAILS[self.tail], linear=nn.Linear(4 * self.width, 2 * self.width))


def _excited(own: Lambda, x: Tensor) -> Tensor:
    y = own.act(own.norm0(own.conv(x)))
    return y * torch.sigmoid(own.up(F.relu(own.down(y.mean((2, 3))))))[:, :, None, None]


def _pooled(own: Lambda, x: Tensor) -> Tensor:
    y = F.dropout2d(F.avg_pool2d(own.conv(x), 3, stride=1, padding=1), 0.2, own.training)
    return F.interpolate(own.act(own.norm0(y)), scale_factor=2, mode="bilinear")[:, :, ::2, ::2]


def _halved(own: Lambda, x: Tensor) -> Tensor:
    one, two = x.chunk(2, 1)
    return own.norm0(torch.cat([two, own.act(own.conv(one))], 1))


def _branched(own: Lambda, x: Tensor) -> Tensor:
    pooled = F.max_pool2d(x, 3, stride=1, padding=1)
    return own.act(own.norm1(own.inner(torch.cat([own.side(pooled), own.act(own.conv(x))], 1))))


def _functional(own: Lambda, x: Tensor) -> Tensor:
    y = F.conv2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), own.conv.weight.flip(2), own.conv.bias)
    return own.norm0(y.relu_()).flip(1)


BLOCKS: dict[str, Callable[..., Tensor]] = {
    "plain": lambda own, x: own.act(own.norm0(own.conv(x))),
    "strided": lambda own, x: own.act(own.norm0(own.conv(x))),
    "residual": lambda own, x: own.act(x + own.norm1(own.inner(own.act(own.norm0(own.conv(x)))))),
    "projected": lambda own, x: own.act(own.norm2(own.side(x)) + own.norm1(own.inner(own.act(own.norm0(own.conv(x)))))),
    "padded": lambda own, x: own.act(x + own.norm0(F.pad(own.conv(x), (0, 0, 0, 0, 1, 1)))),
    "preactivated": lambda own, x: x + own.inner(own.act(own.norm1(own.conv(own.act(own.norm0(x)))))),
    "concatenated": lambda own, x: own.inner(torch.cat([x, own.act(own.norm0(own.conv(x)))], 1)),
    "branched": _branched,
    "depthwise": lambda own, x: own.norm1(own.inner(own.act(own.norm0(own.conv(x))))),
    "shuffled": lambda own, x: own.act(own.norm1(own.inner(F.channel_shuffle(own.act(own.norm0(own.conv(x))), 2)))),
    "excited": _excited,
    "repeated": lambda own, x: own.conv(own.act(own.norm0(own.conv(own.act(x))))),
    "halved": _halved,
    "transposed": lambda own, x: F.max_pool2d(own.act(own.norm0(own.conv(x))), 2),
    "pooled": _pooled,
    "functional": _functional,
}
TAILS: dict[str, Callable[..., Tensor]] = {
    "mean": lambda own, x: x.mean((2, 3)),
    "max": lambda own, x: x.flatten(2).amax(2),
    "flat": lambda own, x: F.adaptive_avg_pool2d(x, 2).flatten(1),
    "linear": lambda own, x: torch.relu(own.linear(F.adaptive_avg_pool2d(x, 2).flatten(1))),
}


def random_plan(seed: int) -> Plan:
    """Return the plan of a seed. All choices are equally likely, which they would not be if hypothesis made them."""
    draw = random.Random(seed)
    return Plan(
        blocks=tuple(draw.choices(list(BLOCKS), k=draw.randint(1, 4))),
        norm=draw.choice(list(NORMS)),
        activation=draw.choice(ACTIVATIONS),
        width=draw.choice((8, 12)),
        tail=draw.choice(list(TAILS)),
        seed=seed,
    )


plans = st.integers(0, 2**32 - 1).map(random_plan)
