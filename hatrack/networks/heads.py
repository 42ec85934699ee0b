"""Logits of batches whose examples belong to several tasks."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
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


def heads_by_task(heads: Sequence[nn.Linear], features: Tensor, task: Tensor) -> Tensor:
    """Compute the logits of each example's own head, as `by_task` selects them.

    All heads are one matrix, with as many rows for each as the widest has, so that the number of operations does not grow
    with the number of heads. A product of another width rounds otherwise, so results depend on how many heads there are.

    Args:
        heads: one per task.
        features: (batch, features).
        task: (batch,), the task of every example.

    Returns:
        (batch, most classes), as in `by_task`.
    """
    width = max(len(head.weight) for head in heads)  # a stack of runs gives a head more rows than it has outputs
    kind = torch.get_autocast_dtype(features.device.type) if torch.is_autocast_enabled(features.device.type) else None
    low = torch.finfo(kind or heads[0].weight.dtype).min  # finite in the type of the logits
    weight = torch.cat(_filled_up([head.weight for head in heads], width, 0.0))
    bias = torch.cat(_filled_up([head.bias for head in heads], width, low))
    logits = F.linear(features, weight, bias).view(-1, len(heads), width)
    return logits[torch.arange(len(task), device=task.device), task]


def _filled_up(parts: list[Tensor], width: int, value: float) -> list[Tensor]:
    """Return tensors with rows of a value after each that has fewer rows than the widest."""
    if all(len(part) == width for part in parts):
        return parts
    blank = parts[0].new_full((width, *parts[0].shape[1:]), value)
    return [piece for part in parts for piece in (part, blank[len(part) :])]


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
