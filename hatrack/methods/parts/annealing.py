"""The annealing of hard attention: gates that are soft at the beginning of every epoch and hard at its end (HAT, Eq. 3)."""

from typing import Literal

import torch
from torch import Tensor

from hatrack.tasks.split import Batch

Anneal = Literal["paper", "authors"]


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
