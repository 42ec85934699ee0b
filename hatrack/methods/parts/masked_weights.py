"""Weights times their gates, with the gradients of both: what PMASK computes in every step, in few operations."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hatrack.methods.parts.capturing import is_capturing
from hatrack.methods.parts.vectors import pieces

CLOSED = 2e-22  # sigmoid(-50), rounded up
aten = torch.ops.aten


def _in_one(a: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Return whether one operation shall multiply all tensors by gates a: on a GPU, where each operation takes time."""
    return a.is_cuda and not is_capturing() and all(t.dtype == a.dtype for t in tensors)


def soft_gates(e: Tensor, s: Tensor | float) -> Tensor:
    """Return the gates sigmoid(se) of embeddings, clamped as in HAT; smaller gates would also make a CPU slow."""
    return (s * e).clamp_(-50, 50).sigmoid_()


def times_slope(grad: Tensor, sigmoid: Tensor, a: Tensor) -> Tensor:
    """Multiply in place by the slope of sigmoid(e), and by 0 unless CLOSED < a < 1. Return the result."""
    aten.sigmoid_backward.grad_input(grad, sigmoid, grad_input=grad)  # times sigmoid(e) (1 - sigmoid(e))
    aten.hardtanh_backward.grad_input(grad, a, CLOSED, 1, grad_input=grad)
    return grad


class Masked(torch.autograd.Function):
    """Computes the weights times their gates a = sigmoid(se), and the capacity term: the share of free weights that a opens.

    The gradient of e is compensated for the annealing as in HAT (2.5). The slope of the gate, s a (1 - a), times the factor
    smax (cosh(se) + 1) / (s (cosh(e) + 1)) is smax sigmoid(e) (1 - sigmoid(e)), because a (1 - a) = 1 / (2 (cosh(se) + 1)).
    As in HAT, the gradient is 0 outside -50 < se < 50, and where a is exactly 1, in float32 from about se = 17 on.
    """

    @staticmethod
    def forward(ctx: Any, e: Tensor, s: Tensor, smax: float, price: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        a = soft_gates(e, s)
        ctx.smax = smax
        ctx.save_for_backward(e, a, price, *weights)
        gates = pieces(a, weights)
        if _in_one(a, weights):
            return *torch._foreach_mul(weights, gates), torch.dot(a, price)
        return *[(w * gate).to(w.dtype) for w, gate in zip(weights, gates, strict=True)], torch.dot(a, price)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        e, a, price, *weights = ctx.saved_tensors
        *outer, capacity = grads
        grad = price * (ctx.smax * capacity)  # smax times the gradient of a
        for part, g, w in zip(pieces(grad, weights), outer, weights, strict=True):
            if w.is_complex():
                part.add_((g * w.conj()).real, alpha=ctx.smax)
            else:
                part.addcmul_(g, w, value=ctx.smax)
        if _in_one(a, outer):
            times_slope(grad, torch.sigmoid(e), a)
            return grad, None, None, None, *torch._foreach_mul(outer, pieces(a, weights))
        reused = torch.sigmoid(e)  # its memory is used again for the gradients of the weights: new memory is slow
        times_slope(grad, reused, a)
        parts = zip(outer, pieces(a, weights), pieces(reused, weights), strict=True)
        fresh = is_capturing()  # the compiler plans memory itself, and refuses to write channels-last results in place
        scaled = [g * gate if g.is_complex() or fresh else torch.mul(g, gate, out=part) for g, gate, part in parts]
        return grad, None, None, None, *scaled
