"""The optimizers of a fit: that of the regime, and plain SGD on parameters that have learning rates of their own."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hatrack.engine.optimizers import Optimizer, clip, with_gradient
from hatrack.regime import Regime


class Optimizers:
    """The regime's optimizer on a method's weights, and plain SGD on the parameters that have rates of their own."""

    def __init__(self, regime: Regime, weights: list[nn.Parameter], plain: dict[nn.Parameter, float]) -> None:
        self.weights, self.plain = weights, [*plain]
        self.moved = weights  # those that may have a gradient
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
        """Drop all gradients that there have been since the last call."""
        for parameter in (*self.moved, *self.plain):  # as the optimizers' own, in a tenth of the time
            parameter.grad = None
        self.moved = self.weights

    def step(self, limit: float) -> None:
        """Move all parameters that have a gradient; those of the weights are clipped at a limit, unless it is 0."""
        self.moved = with_gradient(self.weights)
        if limit:
            clip(self.moved, limit)
        self.main.step(self.moved)
        for optimizer in self.all[1:]:
            optimizer.step()

    def tensors(self, weights: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Return what the regime's optimizer keeps of the weights, by the name of the weight and its own: "w/momentum"."""
        kept = {name: self.main.state.get(parameter, {}) for name, parameter in weights.items()}
        return {f"{name}/{key}": tensor for name, tensors in kept.items() for key, tensor in tensors.items()}
