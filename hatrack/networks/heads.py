"""Logits of batches whose examples belong to several tasks."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def by_task(logits: list[Tensor], task: Tensor) -> Tensor:
    """Select the logits of each example's own task.

    Args:
        logits: (batch, classes), one tensor per task.
        task: (batch,), the task of every example.

    Returns:
        (batch, most classes); the columns of classes that a task does not have are the lowest number of the data type.
    """
    width, low = max(t.shape[1] for t in logits), torch.finfo(logits[0].dtype).min
    rows = torch.stack([F.pad(t, (0, width - t.shape[1]), value=low) for t in logits])
    return rows[task, torch.arange(len(task), device=task.device)]


def grouped(forward: Callable[[Tensor, int], Tensor], x: Tensor, task: Tensor) -> Tensor:
    """Compute the logits of each example's own task by a forward pass per task that occurs.

    It reads values of `task`, so it must not be used within a training step that is recorded or compiled.

    Args:
        forward: maps a batch of inputs and a task to logits.
        x: a batch of inputs.
        task: (batch,), the task of every example.

    Returns:
        (batch, most classes), as in `by_task`.
    """
    parts = [(task == k).nonzero()[:, 0] for k in sorted(set(task.tolist()))]
    logits = [forward(x[rows], int(task[rows[0]])) for rows in parts]
    width, low = max(t.shape[1] for t in logits), torch.finfo(logits[0].dtype).min
    result = logits[0].new_full((len(x), width), low)
    for rows, part in zip(parts, logits, strict=True):
        result[rows, : part.shape[1]] = part
    return result
