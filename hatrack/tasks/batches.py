"""The batches of an epoch."""

import torch
from torch import Tensor


def count_batches(examples: int, batch: int) -> int:
    """Return how many batches an epoch has: see `split_batches`."""
    return max(1, -(-examples // batch) - (examples % batch == 1)) if batch > 1 else examples


def split_batches(order: Tensor, batch: int) -> list[Tensor]:
    """Split the examples of an epoch into batches.

    A single example that is left over joins the batch before: alone it has no variance, and a batch norm could not train
    on it.
    """
    parts = list(torch.split(order, batch))
    if len(parts) > 1 and batch > 1 and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts
