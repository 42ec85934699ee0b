"""The optimizers of a fit: that of the regime, and plain SGD on parameters that have learning rates of their own."""

import torch
from torch import nn

from hatrack.engine.optimizers import Optimizer
from hatrack.regime import Regime


class Optimizers:
    """The regime's optimizer on a method's weights, and plain SGD on the parameters that have rates of their own."""

    def __init__(self, regime: Regime, weights: list[nn.Parameter], plain: dict[nn.Parameter, float]) -> None:
        self.weights, self.parameters = weights, [*weights, *plain]
        self.starts = [regime.lr, *plain.values()]
        self.lrs = [torch.full((), lr, device=weights[0].device) for lr in self.starts]
        self.main = Optimizer(regime, weights, self.lrs[0])
        own = Regime()  # plain SGD
        self.all = [self.main, *(Optimizer(own, [p], lr) for p, lr in zip(plain, self.lrs[1:], strict=True))]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the weights; the other rates fall in proportion."""
        for tensor, start in zip(self.lrs, self.starts, strict=True):
            tensor.fill_(start * (lr / self.starts[0]))

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters:  # as the optimizers' own, in a tenth of the time
            parameter.grad = None

    def step(self) -> None:
        """Move all parameters that have a gradient."""
        for optimizer in self.all:
            optimizer.step()
