"""Which weights tasks have in common, counted on the masks of methods that have them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def overlaps(rows: Tensor) -> Tensor:
    """Return how many entries two tasks have in common (tasks, tasks), given bools (tasks, weights)."""
    common = [[torch.count_nonzero(one & other) for other in rows] for one in rows]
    return torch.stack([torch.stack(row) for row in common]).double().cpu()


def shared_with_earlier(masks: Mapping[int, Mapping[str, Tensor]]) -> dict[int, dict[int, float]]:
    """Return which earlier tasks each task shares weights with, and the share of its own weights that it shares.

    Args:
        masks: the masks of weights by task, in the order of learning, each by the name of the parameter.
    """
    tasks: Sequence[int] = list(masks)
    if not tasks or not masks[tasks[0]]:
        return {}
    both = torch.zeros(len(tasks), len(tasks), dtype=torch.float64)
    for name in masks[tasks[0]]:
        both += overlaps(torch.stack([masks[task][name].reshape(-1) for task in tasks]))
    shares = both / both.diagonal().clamp(min=1)[:, None]
    return {
        task: {earlier: shares[i, j].item() for j, earlier in enumerate(tasks[:i]) if shares[i, j] > 0}
        for i, task in enumerate(tasks)
    }
