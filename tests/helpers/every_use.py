"""Networks that use their parameters in every way, in float64: in layers, in several calls, without a layer, by branches."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from hatrack import Method, Network
from hatrack.networks.mlp import mlp


class Double(nn.Module):
    """Images as float64, so that the loop and the batched way can be compared closely."""

    def forward(self, x: Tensor) -> Tensor:
        return x.double()


class Twice(nn.Module):
    """One layer used three times: on rows, on rows again, on positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)[:, :8].sin()
        again = self.layer(torch.relu(self.layer(x)))
        return again + self.layer(torch.stack([x, again], 1)).mean(1)


class Residual(nn.Module):
    """Convolutions of many kinds, norms, a shortcut, operations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.first = nn.Conv2d(8, 8, 3, padding="same", dilation=2, groups=4)
        self.second = nn.Conv2d(8, 8, (1, 3), padding=(0, 1), padding_mode="circular")
        self.group = nn.GroupNorm(2, 8)
        self.down = nn.Conv2d(8, 6, 2, stride=2)
        self.instance = nn.InstanceNorm2d(6, affine=True)
        self.up = nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1, groups=2)
        self.out = nn.Linear(64, 8)
        self.layer = nn.LayerNorm(8)
        draw = torch.Generator().manual_seed(0)
        self.norm.running_mean.normal_(generator=draw)
        self.norm.running_var.uniform_(0.5, 2, generator=draw)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)), inplace=True)
        y = self.second(F.relu_(self.first(x)))
        y += x
        y = self.instance(torch.tanh(self.down(self.group(y))))
        return self.layer(self.out(self.up(y).flatten(1)))


class Volumes(nn.Module):
    """Convolutions in one and three dimensions, and their transposes."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.unline = nn.Conv1d(1, 4, 3, stride=2, padding=2, dilation=2, groups=1), nn.ConvTranspose1d(4, 2, 2)
        self.space, self.unspace = nn.Conv3d(1, 4, 2, padding=1), nn.ConvTranspose3d(4, 2, 2, stride=2, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        line = self.unline(torch.tanh(self.line(x.flatten(2)))).flatten(1)
        space = self.unspace(torch.tanh(self.space(x.reshape(-1, 1, 2, 2, 4)))).flatten(1)
        return torch.cat([line, space], 1)


class Tokens(nn.Module):
    """Parameters that no layer holds, attention, positions looked up in a table, a computed weight, a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.scale = nn.Parameter(torch.ones(1, 1, 4) / 3), nn.Parameter(torch.linspace(-1, 1, 4))
        self.places, self.attention = nn.Embedding(5, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.computed, self.tied = weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4)
        self.unused = nn.Parameter(torch.ones(3))
        self.mixed = nn.Linear(20, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x.flatten(1).view(len(x), 4, 4)], 1)
        x = x * self.scale + self.places(torch.arange(5))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = torch.tanh(self.tied(self.computed(x))) @ self.tied.weight
        return F.linear(bias=self.mixed.bias, weight=self.mixed.weight, input=x.flatten(1))


class Rows(nn.Module):
    """Layers whose rows are not the examples: positions first (as many as a pass has images), and rows all in one."""

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.positions = positions
        self.first, self.folded = nn.Linear(16 // positions, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)[:, : 16 // self.positions * self.positions].view(len(x), self.positions, -1)
        x = torch.tanh(self.first(x.transpose(0, 1)))  # (positions, images, 4)
        return self.folded(x.transpose(0, 1).reshape(-1, 4)).view(-1, self.positions * 2)


class InPlace(nn.Module):
    """Writes into a fresh tensor, which vmap can't follow, with a parameter that no layer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.layer = nn.Parameter(torch.ones(16) / 2), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(len(x), 16, dtype=torch.float64)
        out += x.flatten(1).tanh() * self.shift
        return self.layer(out)


class OwnStatistics(nn.Module):
    """A norm by the statistics of the batch: an example by itself is another thing than in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv2d(1, 3, 2, bias=False), nn.BatchNorm2d(3, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.layer(x))).flatten(1)


class Choosing(nn.Module):
    """Only some images take a way on which a weight is used without its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        out, chosen = torch.zeros(len(x), 16, dtype=torch.float64), x[:, 0, 0, 0] > 0
        out[chosen], out[~chosen] = self.layer(x[chosen].flatten(1)), x[~chosen].flatten(1) @ self.layer.weight
        return out


class Looking(nn.Module):
    """The branch depends on the sum over the batch, so a batch is another thing than its images."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(self.layer(x.flatten(1)))
        return torch.tanh(self.layer(out)) if x.sum() > 0 else out * 2


TRUNKS = {
    "mlp": lambda: mlp((1, 4, 4), widths=(12, 10), dropout=0.5, input_dropout=0.2),
    "layer used three times": Twice,
    "residual": Residual,
    "one and three dimensions": Volumes,
    "parameters used anyhow": Tokens,
    "two positions first": lambda: Rows(2),
    "three positions first": lambda: Rows(3),
    "sixteen positions first": lambda: Rows(16),
    "in place": InPlace,
    "statistics of the batch": OwnStatistics,
}


def make(trunk: nn.Module, *, heads: str = "shared") -> Method:
    net = Network(nn.Sequential(Double(), trunk.double()), [3, 3], torch.zeros(2, 1, 4, 4), heads=heads).double()
    return Method(net)


def wanted(method: Method, head: int = 0) -> list[nn.Parameter]:
    return [*method.net.trunk.parameters(), *method.net.heads[head].parameters()]
