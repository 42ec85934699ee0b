"""Treat the parameters of a method as one vector, in which penalties, merges and projections are written."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def values(parameters: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Concatenate all values into one vector. Gradients flow through it, unless it is written into `out`."""
    return torch.cat([p.reshape(-1) for p in parameters], out=out) if parameters else torch.zeros(0)


def grads(parameters: Sequence[nn.Parameter], out: Tensor | None = None) -> Tensor:
    """Concatenate all gradients into one vector, with zeros for a parameter that has no gradient."""
    return values([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters], out)


def extended(vector: Tensor, now: Tensor) -> Tensor:
    """Return a vector of weights as long as `now`, with the last values of `now` in the new places.

    A head that grows has its new rows at the end of `Network.shared_parameters`.
    """
    return vector if len(vector) == len(now) else torch.cat([vector, now.detach()[len(vector) :].to(vector)])


def pieces(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split a vector into views with the shapes of the tensors in `like`: the inverse of `values`."""
    cuts = torch.split(vector, [p.numel() for p in like]) if like else ()
    return [cut.view_as(p) for cut, p in zip(cuts, like, strict=True)]


@torch.no_grad()
def set_values(parameters: Sequence[nn.Parameter], vector: Tensor) -> None:
    """Write a vector into the parameters, in place."""
    for parameter, piece in zip(parameters, pieces(vector, parameters), strict=True):
        parameter.copy_(piece)


@torch.no_grad()
def set_grads(parameters: Sequence[nn.Parameter], vector: Tensor) -> None:
    """Write a vector into the gradients, in place. A parameter without a gradient is left without."""
    for parameter, piece in zip(parameters, pieces(vector, parameters), strict=True):
        if parameter.grad is not None:
            parameter.grad.copy_(piece)


@torch.no_grad()
def add_to_grads(parameters: Sequence[nn.Parameter], vector: Tensor, scale: float) -> None:
    """Add a vector times `scale` to the gradients, in place. A parameter without a gradient is left without."""
    for parameter, piece in zip(parameters, pieces(vector, parameters), strict=True):
        if parameter.grad is not None:
            parameter.grad.add_(piece, alpha=scale)
