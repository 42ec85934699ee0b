"""Random recurrent networks: fused layers, cells and loops written by hand, with and without layers around them."""

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hatrack.seeds import seeded
from hatrack.tracing.units import Units

FUSED = ("rnn tanh", "rnn relu", "gru", "lstm", "projected lstm")
CELLS = ("rnn tanh cell", "rnn relu cell", "gru cell", "lstm cell")
BY_HAND = ("plain", "plain gru", "plain lstm", "joint lstm", "minimal gated", "residual", "normed", "normed state")
POOLS = ("last", "mean", "max")


class Steps(nn.Module):
    """A loop over time around a cell that maps an input and the state to the next state."""

    def __init__(self, cell: nn.Module, hidden: int, backwards: bool = False) -> None:
        super().__init__()
        self.cell, self.hidden, self.backwards = cell, hidden, backwards

    def forward(self, x: Tensor) -> Tensor:
        h, outputs = x.new_zeros(len(x), self.hidden), []
        state = (h, h) if getattr(self.cell, "pair", isinstance(self.cell, nn.LSTMCell)) else h
        for t in range(x.shape[1])[:: -1 if self.backwards else 1]:
            state = self.cell(x[:, t], state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs[:: -1 if self.backwards else 1], 1)


class Plain(nn.Module):
    """tanh(W x + U h), with a norm or a shortcut."""

    def __init__(self, inputs: int, hidden: int, kind: str) -> None:
        super().__init__()
        self.i, self.h, self.kind = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden), kind
        self.norm = nn.LayerNorm(hidden) if kind.startswith("normed") else nn.Identity()

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        if self.kind == "normed state":
            return torch.tanh(self.i(x) + self.h(self.norm(h)))
        new = torch.tanh(self.norm(self.i(x) + self.h(h)))
        return h + 0.3 * new if self.kind == "residual" else new


class PlainGRU(nn.Module):
    """A GRU by hand; the minimal one has one gate."""

    def __init__(self, inputs: int, hidden: int, kind: str) -> None:
        super().__init__()
        self.minimal, count = kind == "minimal gated", 2 if kind == "minimal gated" else 3
        self.x = nn.ModuleList(nn.Linear(inputs, hidden) for _ in range(count))
        self.h = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(count))

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        z = torch.sigmoid(self.x[0](x) + self.h[0](h))
        r = z if self.minimal else torch.sigmoid(self.x[2](x) + self.h[2](h))
        n = torch.tanh(self.x[1](x) + r * self.h[1](h))
        return (1 - z) * n + z * h


class PlainLSTM(nn.Module):
    """An LSTM by hand: with two layers of four blocks, or with one that reads input and state together."""

    pair = True

    def __init__(self, inputs: int, hidden: int, kind: str) -> None:
        super().__init__()
        self.joint = nn.Linear(inputs + hidden, 4 * hidden) if kind == "joint lstm" else None
        self.x, self.h = nn.Linear(inputs, 4 * hidden), nn.Linear(hidden, 4 * hidden, bias=False)
        if self.joint is not None:
            del self.x, self.h

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, c = state
        blocks = self.x(x) + self.h(h) if self.joint is None else self.joint(torch.cat([x, h], 1))
        i, f, g, o = blocks.chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


def cell(kind: str, inputs: int, hidden: int) -> nn.Module:
    """Return a cell of torch, or one that is written by hand."""
    if kind in CELLS:
        options = {"nonlinearity": "relu"} if "relu" in kind else {}
        return {"rnn": nn.RNNCell, "gru": nn.GRUCell, "lstm": nn.LSTMCell}[kind.split()[0]](inputs, hidden, **options)
    by_hand = PlainGRU if kind in ("plain gru", "minimal gated") else PlainLSTM if "lstm" in kind else Plain
    return by_hand(inputs, hidden, kind)


@dataclass(frozen=True)
class RecurrentPlan:
    """A random recurrent network for sequences (1, steps, 4)."""

    kind: str
    layers: int
    bidirectional: bool
    hidden: int
    steps: int
    bias: bool
    batch_first: bool
    dropout: float
    before: bool
    after: bool
    pool: str
    optimizer: str
    seed: int

    def build(self) -> nn.Module:
        """Return the network, with weights drawn from the plan's seed."""
        with seeded(self.seed, "random recurrent network"):
            return RecurrentNet(self)


class RecurrentNet(nn.Module):
    """A linear layer or none, recurrent layers, a pool over time, and a linear layer or none."""

    def __init__(self, plan: RecurrentPlan) -> None:
        super().__init__()
        self.plan, inputs = plan, 8 if plan.before else 4
        self.before = nn.Sequential(nn.Linear(4, 8), nn.ReLU()) if plan.before else nn.Identity()
        if plan.kind in FUSED:
            self.recurrent: nn.Module = self._fused(inputs)
            width = 2 * plan.hidden // 3 if plan.kind == "projected lstm" else plan.hidden
        else:
            directions, width = (False, True) if plan.bidirectional else (False,), plan.hidden
            sizes = [inputs, *[width * len(directions)] * (plan.layers - 1)]
            self.recurrent = nn.ModuleList(
                nn.ModuleList(Steps(cell(plan.kind, size, width), width, back) for back in directions) for size in sizes
            )
        width *= 2 if plan.bidirectional else 1
        self.after = nn.Sequential(nn.Linear(width, 16), nn.ReLU()) if plan.after else nn.Identity()

    def _fused(self, inputs: int) -> nn.Module:
        plan = self.plan
        options = {"num_layers": plan.layers, "bidirectional": plan.bidirectional, "bias": plan.bias}
        options |= {"batch_first": plan.batch_first, "dropout": plan.dropout if plan.layers > 1 else 0.0}
        if plan.kind == "projected lstm":
            options["proj_size"] = 2 * plan.hidden // 3
        if plan.kind == "rnn relu":
            options["nonlinearity"] = "relu"
        kind = nn.LSTM if "lstm" in plan.kind else nn.GRU if plan.kind == "gru" else nn.RNN
        return kind(inputs, plan.hidden, **options)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x[:, 0])
        if isinstance(self.recurrent, nn.ModuleList):
            for layer in self.recurrent:
                x = torch.cat([steps(x) for steps in layer], 2)
        else:
            x = self.recurrent(x)[0] if self.plan.batch_first else self.recurrent(x.transpose(0, 1))[0].transpose(0, 1)
        pooled = {"last": lambda: x[:, -1], "mean": lambda: x.mean(1), "max": lambda: x.amax(1)}[self.plan.pool]()
        return self.after(pooled)


def recurrent_plan(seed: int) -> RecurrentPlan:
    """Return the plan of a seed; seeds 0, 1, 2, ... go through all kinds in turn."""
    draw, kinds = random.Random(seed), (*FUSED, *CELLS, *BY_HAND)
    kind = kinds[seed % len(kinds)]
    plan = RecurrentPlan(
        kind=kind,
        layers=draw.choice((1, 2, 3) if kind in FUSED else (1, 1, 2)),
        bidirectional=draw.random() < (0.4 if kind in FUSED else 0.2),
        hidden=draw.choice((16, 20, 24)),
        steps=draw.choice((8, 10, 14) if kind in FUSED else (6, 8)),
        bias=draw.random() < 0.8,
        batch_first=draw.random() < 0.5,
        dropout=draw.choice((0.0, 0.1)),
        before=draw.random() < 0.5,
        after=draw.random() < 0.5,
        pool=draw.choice(POOLS),
        optimizer=draw.choice(("sgd", "momentum", "adam", "adamw")),
        seed=seed,
    )
    if "lstm" in kind and plan.layers == 3:  # within this short training SGD does not learn it, by itself either
        return replace(plan, optimizer="adam", layers=2 if kind == "projected lstm" else 3)
    return plan


def rows_of_closed_units(units: Units, gates: Tensor) -> dict[str, Tensor]:
    """Return which weights write a closed unit, by name: a mask of whole rows and of elements of biases."""
    found = {
        name: torch.zeros(p.shape, dtype=torch.bool) for name, p in units.trunk.named_parameters() if name in units.traced
    }
    for own in units.layers.values():
        closed = torch.arange(own.start, own.stop)[~gates[own]]
        if len(closed) in (0, own.stop - own.start):
            continue  # of a layer that is closed whole, what reads it would be free as well
        values = torch.ones(units.count)
        values[closed] = 0
        for name, mask in units.weight_masks(values).items():
            if name in found:
                free = mask == 0
                found[name] |= free.all(1, keepdim=True).expand_as(free) if free.dim() == 2 else free
    return found
