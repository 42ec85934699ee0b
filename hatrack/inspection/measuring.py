"""Measure what the finished tasks of a method use of its weights, at the end or after every epoch."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from hatrack.inspection.capacity import Capacity, LayerCapacity
from hatrack.inspection.layers import layer_titles, title_of
from hatrack.methods.fit import FitResult
from hatrack.methods.method import Method
from hatrack.methods.parts.reuse import overlaps
from hatrack.options import expect


@torch.no_grad()
def capacity(method: Method) -> Capacity:
    """Measure what the finished tasks of a method use.

    Args:
        method: HAT, PMASK, PackNet, or a method of your own with `weight_masks`.

    Returns:
        The capacity; without layers if the method has no masks.

    Example:
        >>> method = hr.HAT(hr.Network(trunk, tasks=tasks))
        >>> result = method.learn(tasks[0], hr.Trainer(hr.Regime(epochs=2)))
        >>> found = hr.capacity(method)
        >>> [layer.title for layer in found.layers], 0 < found.free < 1
        (['linear 1, 50 units'], True)
    """
    expect("method", method, Method, "a Method, such as HAT(network)")
    masks = [method.weight_masks(task) for task in method.history]
    names = list(method.history.values())
    chosen = [name for name, mask in masks[0].items() if mask.dim() > 1] if masks else []
    if not chosen:
        return Capacity(names)
    titles = layer_titles(method.net.trunk)
    count = len(names)
    both, layers = torch.zeros(count, count, dtype=torch.float64), []
    for name in chosen:
        rows = torch.stack([mask[name].reshape(-1) for mask in masks])
        both += overlaps(rows)
        layers.append(_layer(name, title_of(name, titles), rows))
    total = sum(layer.weights for layer in layers)
    used = [sum(layer.used[t] * layer.weights for layer in layers) / total for t in range(count)]
    sizes = both.diagonal()
    learned = list(method.history)
    frozen = [_share(method.frozen_by(learned[: k + 1]), chosen) for k in range(count)]
    return Capacity(
        tasks=names,
        layers=layers,
        used=used,
        own=(sizes / total).tolist(),
        reuse=(both / sizes.clamp(min=1)[:, None]).tolist(),
        shared_by=[sum(layer.shared_by[k] for layer in layers) for k in range(count + 1)],
        frozen=frozen,
    )


def _share(masks: Mapping[str, Tensor], names: Collection[str]) -> float:
    """Return the share of the elements of these masks that are true."""
    return sum(int(torch.count_nonzero(masks[name])) for name in names) / sum(masks[name].numel() for name in names)


def _layer(name: str, title: str, rows: Tensor) -> LayerCapacity:
    weights, users = rows.shape[1], rows.sum(0, dtype=torch.int16)  # int64 takes four times as long
    so_far, used = torch.zeros_like(rows[0]), []
    for row in rows:
        so_far = so_far | row
        used.append(int(torch.count_nonzero(so_far)) / weights)
    return LayerCapacity(
        name=name,
        title=title,
        weights=weights,
        used=used,
        own=[int(torch.count_nonzero(row)) / weights for row in rows],
        shared_by=torch.bincount(users.cpu(), minlength=len(rows) + 1).tolist(),
    )


class CapacityCurve:
    """Notes after every epoch the share of the weights that are frozen if the task is finished then (HAT, figure 5).

    A `Trainer` calls it after each epoch; the shares are in `FitResult.used`.
    """

    @torch.no_grad()
    def __call__(self, method: Method, result: FitResult) -> None:
        """Add the share after an epoch to the result of the fit."""
        masks = method.frozen_by([*(task for task in method.history if task != result.task), result.task])
        if names := [name for name, mask in masks.items() if mask.dim() > 1]:
            result.used.append(_share(masks, names))
