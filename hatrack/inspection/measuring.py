"""Measure what the finished tasks of a method use of its weights, at the end or after every epoch."""

import torch
from torch import Tensor

from hatrack.inspection.capacity import Capacity, LayerCapacity
from hatrack.inspection.layers import layer_titles, title_of
from hatrack.methods.fit import FitResult
from hatrack.methods.method import Method
from hatrack.methods.parts.reuse import overlaps


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
    return Capacity(
        tasks=names,
        layers=layers,
        used=used,
        own=(sizes / total).tolist(),
        reuse=(both / sizes.clamp(min=1)[:, None]).tolist(),
        shared_by=[sum(layer.shared_by[k] for layer in layers) for k in range(count + 1)],
    )


def _layer(name: str, title: str, rows: Tensor) -> LayerCapacity:
    weights, users = rows.shape[1], rows.sum(0)
    so_far, used = torch.zeros_like(rows[0]), []
    for row in rows:
        so_far = so_far | row
        used.append(int(so_far.sum()) / weights)
    return LayerCapacity(
        name=name,
        title=title,
        weights=weights,
        used=used,
        own=[int(row.sum()) / weights for row in rows],
        shared_by=torch.bincount(users.cpu(), minlength=len(rows) + 1).tolist(),
    )


class CapacityCurve:
    """Notes after every epoch the share of the weights that finished tasks and the present one use (HAT, figure 5).

    A `Trainer` calls it after each epoch; the shares are in `FitResult.used`.
    """

    def __init__(self) -> None:
        self.before: tuple[int, dict[str, Tensor]] = (-1, {})  # the task being learned, and what the others use

    @torch.no_grad()
    def __call__(self, method: Method, result: FitResult) -> None:
        """Add the share after an epoch to the result of the fit."""
        now = {name: mask for name, mask in method.weight_masks(result.task).items() if mask.dim() > 1}
        if not now:
            return
        if self.before[0] != result.task:
            others = [method.weight_masks(task) for task in method.history if task != result.task]
            union = {name: torch.stack([mask[name] for mask in others]).any(0) for name in now} if others else {}
            self.before = result.task, union
        used = sum(int((mask | self.before[1].get(name, mask)).sum()) for name, mask in now.items())
        result.used.append(used / sum(mask.numel() for mask in now.values()))
