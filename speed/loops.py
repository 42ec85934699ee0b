"""Plain PyTorch loops to compare with: SGD, EWC, SI and HAT as a good engineer writes them, without a library.

Nothing here needs hatrack, so that the peers, which live in an environment of their own, train the same network on the same
data. The tensors lie on the device, already normalised; a batch is an index.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH = 64
LR = 0.05
CLASSES = 10
SMAX = 400.0  # of HAT


def noise(task: int, count: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Raw images (count, *shape) and labels of a task; the same numbers give the same task."""
    draw = torch.Generator().manual_seed(task)
    return torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=draw), torch.arange(count) % CLASSES


def perceptron() -> nn.Sequential:
    """784-100-100-10."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, CLASSES)
    )


class Plain:
    """SGD, nothing else."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.weights = list(net.parameters())
        self.optimizer = torch.optim.SGD(self.weights, lr=LR)

    def epoch(self, x: Tensor, y: Tensor) -> None:
        for index in torch.randperm(len(x), device=x.device).split(BATCH):
            self.step(x[index], y[index])

    def step(self, x: Tensor, y: Tensor) -> None:
        loss = F.cross_entropy(self.net(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def finish(self, x: Tensor, y: Tensor) -> None:
        """After a task."""


class EWC(Plain):
    """(strength / 2) sum F (theta - anchor)^2 for every earlier task, each with its own anchor and Fisher."""

    def __init__(self, net: nn.Module, strength: float = 200.0) -> None:
        super().__init__(net)
        self.strength = strength
        self.anchors: list[list[tuple[Tensor, Tensor]]] = []  # by task, by weight: where it was and its Fisher

    def step(self, x: Tensor, y: Tensor) -> None:
        loss = F.cross_entropy(self.net(x), y)
        for task in self.anchors:
            for weight, (anchor, fisher) in zip(self.weights, task, strict=True):
                loss = loss + self.strength / 2 * (fisher * (weight - anchor).pow(2)).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def finish(self, x: Tensor, y: Tensor) -> None:
        """The Fisher from the gradients of batches, as most codes have it: its size is not what is compared here."""
        fisher = [torch.zeros_like(weight) for weight in self.weights]
        batches = torch.arange(len(x), device=x.device).split(BATCH)
        for index in batches:
            self.optimizer.zero_grad()
            F.cross_entropy(self.net(x[index]), y[index]).backward()
            for total, weight in zip(fisher, self.weights, strict=True):
                total += weight.grad**2 / len(batches)
        self.anchors.append([(weight.detach().clone(), f) for weight, f in zip(self.weights, fisher, strict=True)])


class SI(Plain):
    """c sum Omega (theta - anchor)^2, where Omega is what each weight earned on its path through the earlier tasks."""

    def __init__(self, net: nn.Module, c: float = 0.1, xi: float = 0.1) -> None:
        super().__init__(net)
        self.c, self.xi = c, xi
        self.anchors = [weight.detach().clone() for weight in self.weights]
        self.importances = [torch.zeros_like(weight) for weight in self.weights]
        self.paths = [torch.zeros_like(weight) for weight in self.weights]

    def step(self, x: Tensor, y: Tensor) -> None:
        loss = F.cross_entropy(self.net(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        with torch.no_grad():
            gradients = [weight.grad.clone() for weight in self.weights]  # of the loss alone: the path is made of these
            before = [weight.clone() for weight in self.weights]
            for weight, anchor, importance in zip(self.weights, self.anchors, self.importances, strict=True):
                weight.grad += 2 * self.c * importance * (weight - anchor)
            self.optimizer.step()
            for path, gradient, weight, old in zip(self.paths, gradients, self.weights, before, strict=True):
                path -= gradient * (weight - old)

    @torch.no_grad()
    def finish(self, x: Tensor, y: Tensor) -> None:
        for k, weight in enumerate(self.weights):
            earned = self.paths[k] / ((weight - self.anchors[k]) ** 2 + self.xi)
            self.importances[k] = (self.importances[k] + earned).relu()
            self.anchors[k] = weight.clone()
            self.paths[k] = torch.zeros_like(weight)


class AnnealedGates(torch.autograd.Function):
    """The gates of an embedding at hardness s and their price; the gradient is compensated for the annealing."""

    @staticmethod
    def forward(ctx: Any, e: Tensor, s: float, price: Tensor) -> tuple[Tensor, Tensor]:
        gates = torch.sigmoid(s * e)
        ctx.save_for_backward(e, gates, price)
        ctx.s = s
        return gates, torch.dot(gates, price)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, of_price: Tensor) -> tuple[Tensor | None, ...]:
        e, gates, price = ctx.saved_tensors
        slope = torch.ops.aten.sigmoid_backward(torch.addcmul(grad, price, of_price), gates) * ctx.s
        factor = (ctx.s * e).clamp_(-50, 50).cosh_().add_(1).mul_(SMAX / ctx.s).div_(torch.cosh(e).add_(1))
        return slope.mul_(factor), None, None


class HATByHand(Plain):
    """HAT as short as it can be written for this one perceptron: nothing is traced, and the hardness is a Python number.

    What it takes beyond `Plain` no eager HAT saves. Weights that are in use keep their bits, as in the library.
    """

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__(net)
        _, self.first, _, self.second, _, self.head = net
        self.e = nn.Parameter(torch.randn(self.first.out_features + self.second.out_features))
        self.gates = torch.optim.SGD([self.e], lr=LR)
        self.price = torch.full_like(self.e.detach(), 0.75 / len(self.e))
        trunk = [*self.first.parameters(), *self.second.parameters()]
        # By weight: bits of free weights, which are all set; and the bits of those in use, here none.
        self.frozen = [(p, torch.full_like(p, -1, dtype=torch.int32), torch.zeros_like(p, dtype=torch.int32)) for p in trunk]

    def epoch(self, x: Tensor, y: Tensor) -> None:
        batches = torch.randperm(len(x), device=x.device).split(BATCH)
        for number, index in enumerate(batches):
            self.s = 1 / SMAX + (SMAX - 1 / SMAX) * number / max(1, len(batches) - 1)
            self.step(x[index], y[index])

    def step(self, x: Tensor, y: Tensor) -> None:
        gates, price = AnnealedGates.apply(self.e, self.s, self.price)
        first, second = gates.split([self.first.out_features, self.second.out_features])
        h = F.relu(self.first(x.flatten(1)) * first)
        h = F.relu(self.second(h) * second)
        loss = F.cross_entropy(self.head(h), y) + price
        self.optimizer.zero_grad()
        self.gates.zero_grad()
        loss.backward()
        with torch.no_grad():
            for weight, free, _ in self.frozen:
                weight.grad.view(torch.int32).bitwise_and_(free)
            self.optimizer.step()
            self.gates.step()
            for weight, free, bits in self.frozen:
                weight.view(torch.int32).bitwise_and_(free).bitwise_or_(bits)
            self.e.clamp_(-6, 6)


LOOPS: dict[str, type[Plain]] = {"sgd": Plain, "ewc": EWC, "si": SI, "hat": Plain}  # hat: what its gates cost
