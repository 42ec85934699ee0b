"""Optimizers: torch's fused updates of all weights in one operation, called directly.

`torch.optim` calls the same operations, but on a small network its own Python code takes longer than they do.
"""

import torch
from torch import Tensor, nn

from hatrack.engine import decompositions
from hatrack.regime import Regime

BETAS, EPSILON = (0.9, 0.999), 1e-8  # for Adam
FUSED = {"adam": torch._fused_adam_, "adamw": torch._fused_adamw_}
DECOMPOSED = {"adam": decompositions.adam, "adamw": decompositions.adamw}


def can_fuse(weight: Tensor) -> bool:
    """Return whether torch's fused updates are right for a weight: they assume dense memory, and on a CPU they are wrong for
    16-bit floats."""
    dense = torch.empty_like(weight).stride() == weight.stride()
    return dense and (weight.is_cuda or weight.dtype in (torch.float32, torch.float64))


def with_gradient(weights: list[nn.Parameter]) -> list[nn.Parameter]:
    """Return the weights that have a gradient. After many tasks most have none: the heads of all other tasks."""
    return [weight for weight in weights if weight.grad is not None]


def clip(weights: list[nn.Parameter], limit: float) -> None:
    """Scale all gradients down so that their norm, taken together, is at most the limit."""
    grads = [grad for weight in weights if (grad := weight.grad) is not None]
    if grads:
        torch._foreach_mul_(grads, (limit / (decompositions.norm(grads) + 1e-6)).clamp(max=1))


class Optimizer:
    """The optimizer of a regime: "sgd", "momentum", "adam" or "adamw". Its state exists from the beginning, with zeros.

    Args:
        regime: the regime.
        weights: the parameters to update.
        lr: the learning rate, a 0-d tensor that may change between steps.
    """

    def __init__(self, regime: Regime, weights: list[nn.Parameter], lr: Tensor) -> None:
        self.weights, self.lr, self.kind, self.decay = weights, lr, regime.optimizer, regime.weight_decay
        if self.kind in DECOMPOSED and any(weight.is_complex() for weight in weights):
            raise ValueError(f"{self.kind} takes no complex weights; sgd and momentum do")
        self.momentum = regime.momentum if self.kind == "momentum" else 0.0
        fused = all(map(can_fuse, weights))
        self.sgd = torch._fused_sgd_ if fused else decompositions.sgd
        self.adam = (FUSED if fused else DECOMPOSED).get(self.kind)
        names = {"sgd": [], "momentum": ["momentum_buffer"]}.get(self.kind, ["exp_avg", "exp_avg_sq"])
        self.state = {weight: {name: torch.zeros_like(weight) for name in names} for weight in weights}
        if self.kind in ("adam", "adamw"):
            for weight, state in self.state.items():
                state["step"] = torch.zeros((), device=weight.device)

    def step(self, moved: list[nn.Parameter] | None = None) -> None:
        """Update the weights that have a gradient.

        Args:
            moved: these weights, if they have been found already.
        """
        moved = with_gradient(self.weights) if moved is None else moved
        grads = [grad for weight in moved if (grad := weight.grad) is not None]
        if not moved:
            return
        if self.adam:
            self._adam(moved, grads, [self.state[weight] for weight in moved])
            return
        velocities = [self.state[weight]["momentum_buffer"] for weight in moved] if self.momentum else []
        self.sgd(
            [*moved], grads, velocities, lr=self.lr, momentum=self.momentum, weight_decay=self.decay,
            dampening=0.0, nesterov=False, maximize=False, is_first_step=False,
        )  # fmt: skip

    def _adam(self, weights: list[nn.Parameter], grads: list[Tensor], states: list[dict[str, Tensor]]) -> None:
        means, squares, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
        torch._foreach_add_(steps, 1)
        assert self.adam is not None
        self.adam(
            [*weights], grads, means, squares, [], steps, lr=self.lr, beta1=BETAS[0], beta2=BETAS[1], eps=EPSILON,
            weight_decay=self.decay, amsgrad=False, maximize=False,
        )  # fmt: skip
