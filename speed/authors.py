"""HAT as the authors of the paper train it, in plain PyTorch written from its formulas, to compare with.

What makes it slow is kept: every head is computed in every forward pass, masks and compensation go parameter by parameter,
and after each epoch the training set is evaluated like the validation set, in batches of 64, with a wait after each.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH = 64
LIMIT = 6.0  # of embeddings

Data = tuple[Tensor, Tensor]


class GatedAlexNet(nn.Module):
    """The network of the paper for 32x32x3 images, with an embedding per layer and a head per task."""

    def __init__(self, classes: list[int], *, dropout: float = 0.5, early_dropout: float = 0.2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.Conv2d(3, 64, 4),
                nn.Conv2d(64, 128, 3),
                nn.Conv2d(128, 256, 2),
                nn.Linear(1024, 2048),
                nn.Linear(2048, 2048),
            ]
        )
        self.drops = nn.ModuleList([nn.Dropout(p) for p in (early_dropout, early_dropout, dropout, dropout, dropout)])
        self.heads = nn.ModuleList([nn.Linear(2048, count) for count in classes])
        self.embeddings = nn.ModuleList([nn.Embedding(len(classes), layer.weight.shape[0]) for layer in self.layers])

    def gates(self, task: int, s: float) -> list[Tensor]:
        """a = sigmoid(s e), one row (1, units) per layer."""
        number = torch.tensor([task], device=self.heads[0].weight.device)
        return [torch.sigmoid(s * embedding(number)) for embedding in self.embeddings]

    def forward(self, x: Tensor, task: int, s: float) -> tuple[list[Tensor], list[Tensor]]:
        """The logits of all tasks, and the gates of this one."""
        gates = self.gates(task, s)
        for layer, drop, gate in zip(self.layers, self.drops, gates, strict=True):
            if isinstance(layer, nn.Conv2d):
                x = F.max_pool2d(drop(F.relu(layer(x))), 2) * gate[:, :, None, None]
            else:
                x = drop(F.relu(layer(x.flatten(1)))) * gate
        return [head(x) for head in self.heads], gates


class Authors:
    """The authors' training loop: plain SGD on all parameters, clipping, annealing, evaluation of both sets every epoch."""

    def __init__(self, net: GatedAlexNet, *, smax: float = 400.0, c: float = 0.75, lr: float = 0.05, clip: float = 1e4):
        self.net, self.smax, self.c, self.clip = net, smax, c, clip
        self.optimizer = torch.optim.SGD(net.parameters(), lr=lr)
        self.used: list[Tensor] = []  # by layer (1, units): how much finished tasks use each unit
        self.free: dict[str, Tensor] = {}  # by parameter: what its gradient is multiplied with
        self.lowest = math.inf
        self.best: dict[str, Tensor] = {}

    def epoch(self, task: int, train: Data, valid: Data) -> None:
        self.train(task, *train)
        self.evaluate(task, *train)
        loss, _ = self.evaluate(task, *valid)
        if loss < self.lowest:
            self.lowest = loss
            self.best = {name: value.clone() for name, value in self.net.state_dict().items()}

    def train(self, task: int, x: Tensor, y: Tensor) -> None:
        self.net.train()
        order = torch.randperm(len(x)).to(x.device)
        for start in range(0, len(x), BATCH):
            index = order[start : start + BATCH]
            self.step(task, x[index], y[index], 1 / self.smax + (self.smax - 1 / self.smax) * start / len(x))

    def step(self, task: int, x: Tensor, y: Tensor, s: float) -> None:
        outputs, gates = self.net(x, task, s)
        loss, _ = self.loss(outputs[task], y, gates)
        self.optimizer.zero_grad()
        loss.backward()
        for name, parameter in self.net.named_parameters():
            if name in self.free:
                parameter.grad *= self.free[name]
            if name.startswith("embeddings"):
                softened = torch.cosh(torch.clamp(s * parameter.data, -50, 50)) + 1
                parameter.grad *= self.smax / s * softened / (torch.cosh(parameter.data) + 1)
        nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)
        self.optimizer.step()
        for name, parameter in self.net.named_parameters():
            if name.startswith("embeddings"):
                parameter.data = torch.clamp(parameter.data, -LIMIT, LIMIT)

    def loss(self, logits: Tensor, y: Tensor, gates: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Cross-entropy plus c times R, the share of the free units that are open; and R."""
        opened, room = 0.0, 0.0
        for k, gate in enumerate(gates):
            free = 1 - self.used[k] if self.used else torch.ones_like(gate)
            opened, room = opened + (gate * free).sum(), room + free.sum()
        share = opened / room
        return F.cross_entropy(logits, y) + self.c * share, share

    @torch.no_grad()
    def evaluate(self, task: int, x: Tensor, y: Tensor) -> tuple[float, float]:
        """Mean loss and accuracy; three values are read from the device after every batch."""
        self.net.eval()
        total, right, shares = 0.0, 0.0, 0.0
        for index in torch.arange(len(x), device=x.device).split(BATCH):
            outputs, gates = self.net(x[index], task, self.smax)
            loss, share = self.loss(outputs[task], y[index], gates)
            total += loss.item() * len(index)
            right += (outputs[task].argmax(1) == y[index]).float().sum().item()
            shares += share.item() * len(index)
        return total / len(x), right / len(x)

    @torch.no_grad()
    def finish(self, task: int) -> None:
        """After a task: what is used now, and what that leaves of every gradient (Eq. 2)."""
        now = self.net.gates(task, self.smax)
        self.used = [torch.maximum(a, b) for a, b in zip(now, self.used, strict=True)] if self.used else now
        self.free = dict(self._free())
        self.lowest, self.best = math.inf, {}

    def _free(self) -> Iterator[tuple[str, Tensor]]:
        before = None  # how much the units that a layer reads are used; the image has no gates
        for k, layer in enumerate(self.net.layers):
            after = self.used[k][0]
            yield f"layers.{k}.bias", 1 - after
            post = after.view(-1, *[1] * (layer.weight.dim() - 1)).expand_as(layer.weight)
            if before is None:
                yield f"layers.{k}.weight", 1 - post
            else:
                places = layer.weight.shape[1] // len(before)  # the first wide layer reads 2x2 places of every filter
                pre = before.repeat_interleave(places).view(1, -1, *[1] * (layer.weight.dim() - 2))
                yield f"layers.{k}.weight", 1 - torch.minimum(post, pre)
            before = after
