"""Small trunks of many kinds whose widths are attributes of their modules, and methods on them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hatrack import METHODS, NETWORKS, Method, Network, Regime, Task, Trainer
from hatrack.seeds import seeded

SHAPE = (1, 8, 8)


class Branches(nn.Module):
    """Concatenation, a group norm, a depthwise convolution with a shortcut around it, and layers in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(1, 6, 3, padding=1), nn.GroupNorm(2, 10)
        self.depthwise, self.shortcut = nn.Conv2d(10, 20, 3, padding=1, groups=10), nn.Conv2d(10, 20, 1)
        self.up = nn.ConvTranspose2d(20, 8, 2, stride=2, groups=4)
        self.linear, self.out = nn.Linear(8 * 16, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(torch.cat([F.relu(self.one(x)), F.relu(self.two(x))], 1)))
        h = F.relu(self.up(F.adaptive_avg_pool2d(F.relu(self.depthwise(h) + self.shortcut(h)), 2)))
        h = F.relu(self.linear(h.flatten(1)))
        return h + F.relu(self.out(h))


class PackedAttention(nn.Module):
    """Attention whose queries, keys and values are one layer; positions, a class token and a scale per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.embed = 4, nn.Linear(8, 16)
        self.positions, self.token = nn.Parameter(torch.randn(8, 16) * 0.1), nn.Parameter(torch.randn(1, 1, 16) * 0.1)
        self.packed, self.out, self.scale = nn.Linear(16, 48), nn.Linear(16, 16), nn.Parameter(torch.full((16,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x[:, 0]) + self.positions
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        batch, length, width = x.shape
        parts = self.packed(x).reshape(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(batch, length, width)
        return F.relu((x + self.scale * self.out(y))[:, 0])


class Halves(nn.Module):
    """A layer that is split into two halves, by a width that is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.linear, self.out = 24, nn.Linear(64, 24), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.linear(x.flatten(1)).view(-1, self.hidden).chunk(2, 1)
        return F.relu(self.out(one * torch.tanh(two)))


class Encoder(nn.Module):
    """torch's own attention, in a post-norm encoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.embed(x[:, 0])).mean(1)


class Memory(nn.Module):
    """An LSTM in both directions with two layers, for sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(8, 10, 2, batch_first=True, bidirectional=True), nn.Linear(20, 9)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.out(self.lstm(x[:, 0])[0][:, -1]))


class Loop(nn.Module):
    """A recurrent cell in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.cell, self.out = 10, nn.GRUCell(8, 10), nn.Linear(10, 9)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), self.hidden)
        for t in range(x.shape[2]):
            h = self.cell(x[:, 0, t], h)
        return F.relu(self.out(h))


class Norms(nn.Module):
    """Norms with and without parameters, and a slope per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.slope = nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6, affine=False), nn.PReLU(6)
        self.linear, self.batch, self.layer = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.LayerNorm(8, elementwise_affine=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.slope(self.norm(self.conv(x))).mean((2, 3))
        return F.relu(self.layer(self.batch(self.linear(h))))


class WrittenOut(nn.Module):
    """A forward pass that writes the width out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(1, 16, 3, padding=1), nn.Linear(1024, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        x = x.view(-1, 1024)
        return self.linear(x)


def convolutions() -> nn.Module:
    """Layers as in alexnet and cnn: convolutions, dropout and pooling, flattened for linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Dropout(0.2), nn.MaxPool2d(2), nn.Conv2d(6, 5, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(20, 12), nn.ReLU(), nn.Dropout(0.5),
    )  # fmt: skip


TRUNKS = {
    "mlp": lambda: NETWORKS["mlp"](SHAPE, widths=(10, 7)),
    "convolutions": convolutions,
    "resnet18": lambda: NETWORKS["resnet18"](SHAPE, width=2),
    "vit": lambda: NETWORKS["vit"](SHAPE, width=8, depth=1, attention_heads=2),
    "gru": lambda: NETWORKS["gru"](SHAPE, width=6, layers=2),
    "branches": Branches,
    "packed attention": PackedAttention,
    "halves": Halves,
    "encoder": Encoder,
    "lstm": Memory,
    "loop": Loop,
    "norms": Norms,
}

# Methods on them

SIZES = (1, 3, 64)  # images in a batch; the network's example has others
IMAGES = {size: torch.randn(size, *SHAPE, generator=torch.Generator().manual_seed(size)) for size in SIZES}


def build(trunk: str) -> nn.Module:
    with seeded(0, "trunk"):
        return TRUNKS[trunk]()


def make(name: str, tasks: list[Task], trunk: str | nn.Module = "mlp", **options: Any) -> Method:
    return METHODS[name](Network(build(trunk) if isinstance(trunk, str) else trunk, tasks=tasks), **options)


def trainer(**options: Any) -> Trainer:
    return Trainer(Regime(**{"epochs": 1, "batch": 16, "lr": 0.1, **options}))


@torch.no_grad()
def answers(method: Method, task: int) -> dict[int, Tensor]:
    """The logits of a task for batches of several sizes."""
    method.eval()
    return {size: method(images, task) for size, images in IMAGES.items()}


def assert_answers(method: Method, before: dict[int, dict[int, Tensor]]) -> None:
    """Every task answers as before, bit for bit."""
    for task, then in before.items():
        for size, now in answers(method, task).items():
            assert torch.equal(now, then[size]), (task, size)


def changed(method: Method, state: dict[str, Tensor]) -> list[str]:
    """The tensors of a method that differ from an earlier state, and those that only one of both has."""
    now = method.state_dict()
    return [key for key in {*now, *state} if key not in now or key not in state or not torch.equal(now[key], state[key])]
