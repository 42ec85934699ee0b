"""The gradients of a batch: of all of it at once, or of one part after the other, which several processes may share."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hatrack.methods.method import Method
from hatrack.tasks.split import Batch, TaskId
from hatrack.training.ranks import Ranks


def backward(method: Method, batch: Batch) -> tuple[Tensor, Any]:
    """Compute the gradients of a batch; return the loss, and what `edit_grads` needs of its computation."""
    found: Any = method.loss(batch)
    loss, aux = found if isinstance(found, tuple) else (found, None)
    loss.backward()
    return loss, aux


def backward_in_parts(method: Method, batch: Batch, count: int) -> Tensor:
    """Compute the gradients of a batch in so many parts, which takes less memory; return the loss."""
    losses: list[Any] = []
    for part in parts_of(batch, count):
        losses.append(method.loss(part) * (len(part.y) / len(batch.y)))
        losses[-1].backward()
    return torch.stack(losses).sum()


def backward_on_rank(
    method: Method, parameters: Sequence[nn.Parameter], batch: Batch, count: int, ranks: Ranks, seed: int
) -> Tensor:
    """Compute the gradients of a batch together with other processes, each of which takes one part; return the loss.

    Args:
        method: the method.
        parameters: those that get gradients, in an order that all ranks have.
        batch: the whole batch, the same on every rank.
        count: the number of parts.
        ranks: the processes.
        seed: of what this part draws, such as dropout; what all ranks draw stays the same.
    """
    loss: Any = None
    for part in parts_of(batch, count)[ranks.rank : ranks.rank + 1]:  # none, if there are fewer examples than ranks
        device = part.y.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            found = method.loss(part)
        loss = found * (len(part.y) / len(batch.y))
        loss.backward()
    return ranks.sum_parts(parameters, None if loss is None else loss.detach())


def parts_of(batch: Batch, count: int) -> list[Batch]:
    """Cut a batch into so many parts, or fewer if it has fewer examples."""
    x, y, target = batch.x.chunk(count), batch.y.chunk(count), batch.target.for_parts(batch.y)
    tasks: Sequence[TaskId] = batch.task.chunk(count) if isinstance(batch.task, Tensor) else [batch.task] * len(y)
    return [batch._replace(x=x[k], y=y[k], task=task, target=target) for k, task in enumerate(tasks)]
