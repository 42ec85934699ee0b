"""Networks that the package does not know: small ones around one operation, random ones, and a check of their units."""

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


class Do(nn.Module):
    """A module of a function and the parts that it needs: `Do(lambda own, x: own.layer(x).exp(), layer=nn.Linear(3, 4))`."""

    def __init__(self, function: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def just(function: Callable[[Tensor], Tensor]) -> nn.Module:
    return Do(lambda own, x: function(x))


def between(operation: nn.Module, channels: int = 4) -> nn.Module:
    """A convolution to four units, an operation, and a convolution of its `channels` to the three units 4, 5 and 6."""
    parts = {"first": nn.Conv2d(2, 4, 3, padding=1), "operation": operation, "second": nn.Conv2d(channels, 3, 1)}
    return Do(lambda own, x: own.second(own.operation(own.first(x))).flatten(1), **parts)


# A check of units


def check_units(trunk: nn.Module, x: Tensor, **options: Any) -> Units:
    """Weights that random masks leave free don't matter to the features and have no gradient; held ones do.

    All outputs are compared bit for bit. Returns the units, to ask them for more.
    """
    trunk.eval()
    units = Units(trunk, x[:2], **options)
    with torch.no_grad():
        assert torch.equal(units.run(x, torch.ones(units.count, dtype=torch.bool)), trunk(x)), "open gates change something"
    draw = torch.Generator().manual_seed(units.count)
    told = moved = 0
    for share in (0.3, 0.5, 0.7, 0.8, 0.9, 0.9):
        gates = torch.rand(units.count, generator=draw) < share
        features = units.run(x, gates)
        told += (features.std(0) > 0).any().item()
        moved += _free_and_held(units, x, gates, features, draw)
    assert told, "the features are constant, which proves nothing"
    assert moved, "no held weight matters"
    return units


def _free_and_held(units: Units, x: Tensor, gates: Tensor, features: Tensor, draw: torch.Generator) -> bool:
    """Move the free weights, then those held ones that have a gradient; returns whether these changed the features."""
    trunk = {name: p for name, p in units.trunk.named_parameters() if name in units.followed}
    held = {name: table > 0 for name, table in units.spread(gates.float()).items() if name in trunk}
    grads = dict.fromkeys(trunk)
    if features.requires_grad:
        total = (features * torch.randn(features.shape, generator=draw).to(features)).sum()
        found = torch.autograd.grad(total, list(trunk.values()), allow_unused=True)
        grads = dict(zip(trunk, found, strict=True))
    steep = {name: torch.zeros_like(held[name]) if g is None else g != 0 for name, g in grads.items()}
    for name in trunk:
        assert not (steep[name] & ~held[name]).any(), f"a free weight of {name} has a gradient"

    def after(change: Callable[[Tensor], Tensor], where: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            tensors = {name: torch.where(where[name], change(p), p) for name, p in trunk.items()}
            for name, p in trunk.items():
                tensors[name].requires_grad_(p.requires_grad)  # torch chooses the kernel by it
            return units.run(x, gates, tensors)

    def noise(t: Tensor) -> Tensor:
        return torch.randn(t.shape, generator=draw).to(t)

    free = {name: ~table for name, table in held.items()}
    with torch.no_grad():
        before = units.run(x, gates)
    for change in (noise, lambda t: -3 * t, lambda t: 1e30 * noise(t).sign()):
        assert torch.equal(before, after(change, free)), "moving free weights changes the features"
    return not torch.equal(before, after(lambda t: t + noise(t), steep))


def reads(units: Units, layer: str) -> list[set[int] | str]:
    """For every input of a layer, as its first unit reads it: the units without which it is zero, or "always"."""
    first = units.layers[layer].start

    def held(*on: int) -> list[bool]:
        values = torch.zeros(units.count)
        values[list(on)] = 1
        row = units.spread(values)[f"{layer}.weight"][0]
        return (row.reshape(len(row), -1)[:, 0] > 0).tolist()

    alone = held(first)
    pairs = {unit: held(first, unit) for unit in range(units.count) if unit != first}
    return ["always" if on else {unit for unit, also in pairs.items() if also[k]} for k, on in enumerate(alone)]


# Random networks

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "none": lambda channels: nn.Identity(),
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(2, channels),
    "instance": lambda channels: nn.InstanceNorm2d(channels, affine=True),
    "layer": lambda channels: nn.Sequential(LAST, nn.LayerNorm(channels), FIRST),
    "rms": lambda channels: nn.Sequential(LAST, nn.RMSNorm(channels), FIRST),
}
ACTIVATIONS = ("relu", "leaky_relu", "gelu", "silu", "tanh", "elu", "hardswish", "sigmoid", "softplus")
FIRST, LAST = just(lambda x: x.movedim(-1, 1)), just(lambda x: x.movedim(1, -1))  # where the channels are


@dataclass(frozen=True)
class Plan:
    """A random network for images of 3 channels and 8x8: blocks one after the other, of one kind of norm and activation."""

    blocks: tuple[str, ...]
    norm: str
    activation: str
    width: int
    tail: str
    seed: int

    def build(self) -> nn.Module:
        with seeded(self.seed, "random network"):
            first = Do(BLOCKS["plain"], **self.parts(nn.Conv2d(3, self.width, 3, padding=1)))
            return nn.Sequential(first, *(self.block(kind) for kind in self.blocks), self.end())

    def parts(self, conv: nn.Module, inner: nn.Module | None = None, **others: Any) -> dict[str, Any]:
        """What the functions of blocks call: two convolutions, each with a norm behind it, and an activation."""
        width = self.width
        inner = inner or nn.Conv2d(width, width, 3, padding=2, dilation=2, bias=self.norm == "none")
        norms = {f"norm{k}": NORMS[self.norm](width) for k in range(3)}
        return {"conv": conv, "inner": inner, "act": getattr(F, self.activation), **norms, **others}

    def block(self, kind: str) -> nn.Module:
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
        return Do(BLOCKS[kind], **parts)

    def end(self) -> nn.Module:
        """From maps to features."""
        return Do(TAILS[self.tail], linear=nn.Linear(4 * self.width, 2 * self.width))


def _excited(own: Do, x: Tensor) -> Tensor:
    y = own.act(own.norm0(own.conv(x)))
    return y * torch.sigmoid(own.up(F.relu(own.down(y.mean((2, 3))))))[:, :, None, None]


def _pooled(own: Do, x: Tensor) -> Tensor:
    y = F.dropout2d(F.avg_pool2d(own.conv(x), 3, stride=1, padding=1), 0.2, own.training)
    return F.interpolate(own.act(own.norm0(y)), scale_factor=2, mode="bilinear")[:, :, ::2, ::2]


def _halved(own: Do, x: Tensor) -> Tensor:
    one, two = x.chunk(2, 1)
    return own.norm0(torch.cat([two, own.act(own.conv(one))], 1))


def _branched(own: Do, x: Tensor) -> Tensor:
    pooled = F.max_pool2d(x, 3, stride=1, padding=1)
    return own.act(own.norm1(own.inner(torch.cat([own.side(pooled), own.act(own.conv(x))], 1))))


def _functional(own: Do, x: Tensor) -> Tensor:
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


def drawn(seed: int) -> Plan:
    """The plan of a seed: every kind of everything is equally likely, which hypothesis does not do by itself."""
    draw = random.Random(seed)
    return Plan(
        blocks=tuple(draw.choices(list(BLOCKS), k=draw.randint(1, 4))),
        norm=draw.choice(list(NORMS)),
        activation=draw.choice(ACTIVATIONS),
        width=draw.choice((8, 12)),
        tail=draw.choice(list(TAILS)),
        seed=seed,
    )


plans = st.integers(0, 2**32 - 1).map(drawn)
