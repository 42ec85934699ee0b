"""Logits of batches that mix tasks."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def by_task(logits: list[Tensor], task: Tensor) -> Tensor:
    """The logits of each example's own task, out of those of every task: (batch, widest), see `Network.head`."""
    width, low = max(t.shape[1] for t in logits), torch.finfo(logits[0].dtype).min
    rows = torch.stack([F.pad(t, (0, width - t.shape[1]), value=low) for t in logits])
    return rows[task, torch.arange(len(task), device=task.device)]


def grouped(forward: Callable[[Tensor, int], Tensor], x: Tensor, task: Tensor) -> Tensor:
    """The logits of each example's own task by a forward that takes one task at a time; not for use within a step."""
    parts = [(task == k).nonzero()[:, 0] for k in sorted(set(task.tolist()))]
    logits = [forward(x[rows], int(task[rows[0]])) for rows in parts]
    width, low = max(t.shape[1] for t in logits), torch.finfo(logits[0].dtype).min
    result = logits[0].new_full((len(x), width), low)
    for rows, part in zip(parts, logits, strict=True):
        result[rows, : part.shape[1]] = part
    return result
