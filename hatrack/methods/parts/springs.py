"""Springs that pull the weights to where they were: the quadratic penalty of EWC, MAS and IMM, at little cost.

With autograd alone a penalty on every weight is many passes over vectors as long as the network. Its gradient is known when
its value is, so that both are computed together, and the gradient waits for the backward pass.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hatrack.methods.parts.vectors import pieces, values


def spring_energy(weights: Sequence[Tensor], anchor: Tensor, stiffness: Tensor | None = None) -> Tensor:
    """Return 1/2 sum_i stiffness_i (weights_i - anchor_i)^2, which can be differentiated by the weights.

    Args:
        weights: parameters, whose values are the first of the vectors.
        anchor: where the springs pull to, as a vector at least as long as the weights.
        stiffness: of the springs, such a vector as well; None if it is 1 for all.
    """
    if not weights:
        return anchor.new_zeros(())
    energy: Tensor = _Springs.apply(anchor, stiffness, *weights)  # type: ignore[no-untyped-call]
    return energy


class _Springs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, stiffness: Tensor | None, *weights: Tensor) -> Tensor:
        stretch = values(weights)
        stretch -= anchor[: len(stretch)]
        pull = _pull(stretch, stiffness)
        ctx.save_for_backward(pull, anchor, stiffness, *weights)
        return torch.dot(pull, stretch) / 2  # `@` would be of bfloat16 under autocast

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        pull, anchor, stiffness, *weights = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is asked for
            pull = _pull(values(weights) - anchor[: len(pull)], stiffness)
        return None, None, *pieces(gradient * pull, weights)


def _pull(stretch: Tensor, stiffness: Tensor | None) -> Tensor:
    """Return the forces of stretched springs."""
    return stretch if stiffness is None else stiffness[: len(stretch)] * stretch
