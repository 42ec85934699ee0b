"""The annealing of hard attention: gates that are soft at the beginning of every epoch and hard at its end (HAT, Eq. 3)."""

from typing import Annotated, Literal

import torch
from torch import Tensor

from hatrack.options import Option
from hatrack.tasks.split import Batch

Anneal = Literal["paper", "authors"]
ValidationOption = Annotated[
    Literal["loss", "total"],
    Option(
        "by what on validation data lr falls and an epoch is the best: the loss; or total, which has c times the capacity "
        "term in it as in the authors' code, so that training goes on while gates close",
        added=True,
    ),
]


def hardness(batch: Batch, smax: float, anneal: Anneal) -> Tensor:
    """Return the hardness s of the gates in this batch.

    Args:
        batch: the batch.
        smax: the hardness at the end of an epoch.
        anneal: "paper": s grows from 1/smax in the first batch of an epoch to smax in the last one, and is smax if there is
            only one. "authors": s follows the share of the epoch's examples before this batch, as in the authors' code, and
            so never quite reaches smax.
    """
    if anneal == "authors":
        share = batch.seen
    else:
        share = torch.where(batch.steps > 1, batch.step / (batch.steps - 1).clamp(min=1), 1.0)
    return 1 / smax + (smax - 1 / smax) * share


def without_denormals(gates: Tensor) -> Tensor:
    """Raise gates under 1e-12 to 1e-12 without changing their gradient.

    No sum with open gates shows the difference in float32, but products of such gates are denormal numbers, with which a
    CPU is many times slower. They are not set to 0, because a relu has no slope there. In a sum of closed gates alone, as
    of a residual connection, the larger one no longer decides the sign, and so which of them a relu lets learn.
    """
    return gates + (gates.clamp(min=1e-12) - gates).detach()


def compensation(e: Tensor, s: Tensor, smax: float) -> Tensor:
    """Return the factor on the gradient of an embedding: smax (cosh(se) + 1) / (s (cosh(e) + 1)), |se| clamped at 50."""
    return smax / s * (torch.cosh((s * e).clamp(-50, 50)) + 1) / (torch.cosh(e) + 1)
