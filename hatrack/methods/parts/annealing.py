"""The annealing of hard attention: gates that are soft at the beginning of every epoch and hard at its end (HAT, Eq. 3)."""

from typing import Literal

import torch
from torch import Tensor

from hatrack.tasks.split import Batch

Anneal = Literal["paper", "authors"]


def hardness(batch: Batch, smax: float, anneal: Anneal) -> Tensor:
    """s of this batch: from 1/smax to smax within an epoch, and smax if there is only one batch. The authors' code goes by
    the share of examples that were seen before, and so never quite reaches smax."""
    if anneal == "authors":
        share = batch.seen
    else:
        share = torch.where(batch.steps > 1, batch.step / (batch.steps - 1).clamp(min=1), 1.0)
    return 1 / smax + (smax - 1 / smax) * share
