"""Random transformers: small, of every kind of attention, norm, positions and pooling that is in use."""

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hatrack.seeds import seeded

HEADS = 2
TOKENS = 16  # token ids are 0 to 15


class OwnRMSNorm(nn.Module):
    """A root mean square norm written out."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Packed(nn.Module):
    """`nn.MultiheadAttention`, with its weights packed."""

    def __init__(self, dim: int, *, weights: bool = False) -> None:
        super().__init__()
        self.inner, self.weights = nn.MultiheadAttention(dim, HEADS, dropout=0.1, batch_first=True), weights

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=self.weights)[0]


class Crossed(Packed):
    """Attention of the sequence to its own second half, in which queries and keys differ."""

    def forward(self, x: Tensor) -> Tensor:
        other = x[:, x.shape[1] // 2 :]
        return self.inner(x, other, other, need_weights=self.weights)[0]


class Attention(nn.Module):
    """Attention with layers of its own.

    Args:
        dim: channels.
        how: "fused" (`F.scaled_dot_product_attention`), "grouped" (two queries share keys and values), "matmul", "einsum",
            "biased" (a learned bias for every distance), or "normed" (queries and keys are normalised, with a temperature).
        rotary: whether queries and keys are rotated by their position.
        causal: whether a position sees only those before it.
    """

    def __init__(self, dim: int, how: str, *, rotary: bool = False, causal: bool = False) -> None:
        super().__init__()
        self.how, self.rotary, self.causal = how, rotary, causal
        self.shared = 2 if how == "grouped" else 1
        self.q, self.kv, self.out = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim // self.shared), nn.Linear(dim, dim)
        if how == "biased":
            self.distances = nn.Parameter(torch.zeros(2 * 32, HEADS).normal_(std=0.02))
        if how == "normed":
            self.temperature = nn.Parameter(torch.zeros(HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.kv(x).chunk(2, -1)
        heads = HEADS // self.shared
        q, k, v = (t.unflatten(-1, (h, -1)).transpose(1, 2) for t, h in ((self.q(x), HEADS), (k, heads), (v, heads)))
        if self.rotary:
            q, k = rotated(q), rotated(k)
        if self.shared > 1:
            k, v = k.repeat_interleave(self.shared, 1), v.repeat_interleave(self.shared, 1)
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return what the heads read, (batch, heads, positions, channels of a head)."""
        length = q.shape[2]
        if self.how in ("fused", "grouped"):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 * self.training, is_causal=self.causal)
        if self.how == "normed":
            logits = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.temperature.exp()
        elif self.how == "einsum":
            logits = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(q.shape[-1])
        else:
            logits = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        if self.how == "biased":
            place = torch.arange(length)
            logits = logits + self.distances[place[:, None] - place[None] + 32].permute(2, 0, 1)
        if self.causal:
            logits = logits.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
        weights = F.dropout(logits.softmax(-1), 0.1, self.training)
        return torch.einsum("bhij,bhjd->bhid", weights, v) if self.how == "einsum" else weights @ v


def rotated(x: Tensor) -> Tensor:
    """Rotate pairs of channels by their position, as rotary positions do."""
    one, two = x.chunk(2, -1)
    speeds = 100.0 ** -torch.linspace(0, 1, one.shape[-1])
    angles = torch.arange(x.shape[-2])[:, None] * speeds
    return x * torch.cat([angles.cos()] * 2, -1) + torch.cat([-two, one], -1) * torch.cat([angles.sin()] * 2, -1)


class FeedForward(nn.Module):
    """Two layers with an activation between them, or three with a gate."""

    def __init__(self, dim: int, how: str) -> None:
        super().__init__()
        self.how, hidden = how, 2 * dim
        self.one = nn.Linear(dim, hidden if how in ("relu", "gelu") else 2 * hidden)
        self.two = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        if self.how == "glu":
            return self.two(F.glu(x))
        if self.how == "swiglu":
            gate, x = x.chunk(2, -1)
            return self.two(F.silu(gate) * x)
        return self.two(F.relu(x) if self.how == "relu" else F.gelu(x))


class Block(nn.Module):
    """Attention and a feed-forward part, each beside a shortcut; in training the parts are left out at random."""

    def __init__(self, plan: "TransformerPlan") -> None:
        super().__init__()
        dim = plan.dim
        self.pre, self.drop = plan.pre_norm, plan.drop
        self.norms = nn.ModuleList(NORMS[plan.norm](dim) for _ in range(2))
        self.parts = nn.ModuleList([plan.attention_part(), FeedForward(dim, plan.feed_forward)])
        self.scales = nn.ParameterList(torch.full((dim,), 0.5) for _ in range(2)) if plan.layer_scale else None

    def forward(self, x: Tensor) -> Tensor:
        for k, (norm, part) in enumerate(zip(self.norms, self.parts, strict=True)):
            if self.training and self.drop and torch.rand(()) < self.drop:
                continue
            y = part(norm(x) if self.pre else x)
            y = y if self.scales is None else y * self.scales[k]
            x = x + y if self.pre else norm(x + y)
        return x


NORMS: dict[str, Any] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "own rms": OwnRMSNorm}
ATTENTION = (
    "packed", "packed with weights", "crossed", "fused", "grouped", "matmul", "einsum", "biased", "normed", "encoder",
)  # fmt: skip


@dataclass(frozen=True)
class TransformerPlan:
    """A random transformer for images of 1x8x8 or for sequences of 12 token ids."""

    attention: str
    norm: str
    pre_norm: bool
    feed_forward: str
    positions: str
    pool: str
    tokens: bool
    causal: bool
    layer_scale: bool
    drop: float
    dim: int
    seed: int

    def build(self) -> nn.Module:
        """Return the network, with weights drawn from the plan's seed."""
        with seeded(self.seed, "random transformer"):
            return Transformer(self)

    def attention_part(self) -> nn.Module:
        """Return the part of a block that attends."""
        if self.attention.startswith("packed"):
            return Packed(self.dim, weights="weights" in self.attention)
        if self.attention == "crossed":
            return Crossed(self.dim)
        return Attention(self.dim, self.attention, rotary=self.positions == "rotary", causal=self.causal)

    def blocks(self) -> nn.Module:
        """Return two blocks."""
        if self.attention != "encoder":
            return nn.Sequential(*(Block(self) for _ in range(2)))
        activation = "relu" if self.feed_forward in ("relu", "glu") else "gelu"
        layer = nn.TransformerEncoderLayer(
            self.dim, HEADS, 2 * self.dim, 0.1, activation, batch_first=True, norm_first=self.pre_norm
        )
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Transformer(nn.Module):
    """Patches or token ids, positions, two blocks, and a pool."""

    def __init__(self, plan: TransformerPlan) -> None:
        super().__init__()
        dim, self.plan = plan.dim, plan
        length = (12 if plan.tokens else 16) + (plan.pool == "class token")
        self.embed = nn.Embedding(TOKENS, dim) if plan.tokens else nn.Conv2d(1, dim, 2, 2)
        if plan.pool == "class token":
            self.token = nn.Parameter(torch.zeros(1, 1, dim).normal_(std=0.5))
        if plan.pool == "query":
            self.query = nn.Parameter(torch.zeros(1, 1, dim).normal_(std=0.5))
            self.reader = nn.MultiheadAttention(dim, HEADS, batch_first=True)
        if plan.positions == "learned":
            self.places = nn.Parameter(torch.zeros(1, length, dim).normal_(std=0.5))
        if plan.positions == "table":
            self.places = nn.Embedding(length, dim)
        angles = torch.arange(length)[:, None] * 100.0 ** -torch.linspace(0, 1, dim // 2)
        self.register_buffer("waves", torch.cat([angles.sin(), angles.cos()], 1))
        self.blocks = plan.blocks()
        self.norm = NORMS[plan.norm](dim) if plan.pre_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) if self.plan.tokens else self.embed(x).flatten(2).transpose(1, 2)
        if self.plan.pool == "class token":
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        if self.plan.positions == "learned":
            x = x + self.places
        elif self.plan.positions == "table":
            x = x + self.places(torch.arange(x.shape[1], device=x.device))
        elif self.plan.positions == "waves":
            x = x + self.waves
        x = self.norm(self.blocks(x))
        if self.plan.pool == "query":
            return self.reader(self.query.expand(len(x), -1, -1), x, x)[0][:, 0]
        return x[:, 0] if self.plan.pool == "class token" else x.mean(1)


def random_transformer(seed: int) -> TransformerPlan:
    """Return the plan of a seed; all choices are equally likely."""
    draw = random.Random(seed)
    pool = draw.choice(("mean", "class token", "query"))
    return TransformerPlan(
        attention=draw.choice(ATTENTION),
        norm=draw.choice(list(NORMS)),
        pre_norm=draw.random() < 0.5,
        feed_forward=draw.choice(("relu", "gelu", "glu", "swiglu")),
        positions=draw.choice(("learned", "table", "waves", "rotary")),
        pool=pool,
        tokens=draw.random() < 0.3,
        causal=draw.random() < 0.2 and pool != "class token",  # which stands first and would see nothing
        layer_scale=draw.random() < 0.3,
        drop=draw.choice((0.0, 0.1)),
        dim=draw.choice((24, 32)),
        seed=seed,
    )
