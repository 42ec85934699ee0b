"""Soft gates in a loop that computes its own loss: the forward pass of the task being learned, and how its gates move.

The steps of a `Trainer` have all of this in `loss` and its backward pass.
"""

import torch
from torch import Tensor

from hatrack.methods.hat import HAT
from hatrack.methods.parts.annealing import compensation, slope_times, without_denormals
from hatrack.methods.parts.masked_weights import soft_gates, times_slope
from hatrack.methods.pmask import PMASK
from hatrack.tracing.folded import LastPass

Gated = HAT | PMASK  # what a guard can be made of
CHUNK = 2**18  # entries that a CPU works on at a time, so that what it computes in between stays in its cache


def soft_forward(method: Gated, x: Tensor, task: int, s: Tensor, last: LastPass) -> Tensor:
    """Return the features of the task being learned, with its gates at hardness s, as `loss` has them but for rounding.

    Args:
        method: the method.
        x: a batch of inputs.
        task: the number of the task.
        s: the hardness.
        last: what the last pass has left; PMASK, whose norms have no gates, needs nothing of it.
    """
    if isinstance(method, PMASK):
        return method.run(x, task, method.masked(s)[0])
    opened = method.without_others(without_denormals(method.soft_gates(method.embeddings[task], s)))
    return method.net.head(method.units.run_folded(x, opened, method.tensors(task), last), task)


def gate_gradient(method: Gated, grad: Tensor, s: Tensor) -> Tensor:
    """Return the gradient by which the embedding of the task being learned moves: that of a loss without the capacity term,
    plus c times that of the capacity term, both compensated for the annealing.

    Args:
        method: the method.
        grad: the gradient of the loss; PMASK's is compensated already, and the result is written over it.
        s: the hardness.
    """
    if isinstance(method, PMASK):
        return _gradient_by_weights(method, grad, s)
    e = method.embeddings[method.learning].detach()
    own = slope_times(method.price, e, s, torch.sigmoid(s * e), method.slope) * s  # of c R by e
    return (grad + own) * compensation(e, s, method.smax)


def _gradient_by_weights(method: PMASK, grad: Tensor, s: Tensor) -> Tensor:
    assert method.embeddings is not None
    e = method.embeddings.detach()
    size = CHUNK if e.device.type == "cpu" else max(1, len(e))
    parts = (torch.split(vector, size) for vector in (grad, method.price, e))
    for part, price, own in zip(*parts, strict=True):
        a = soft_gates(own, s)
        part.add_(times_slope(price * (method.smax * method.c), torch.sigmoid(own), a))
    return grad
