"""How much of every layer tasks use, counted in units, and a warning about what is held whole."""

import re
import warnings

import torch
from torch import Tensor

from hatrack.tracing.units import LEFT, Units

MUCH = 0.2  # of the trunk's weights: if more is held whole, a warning says so
SECOND_CALL = re.compile(r"^(.*[^)]) \(call \d+\)$")  # of a layer with a name, not of a function


def warn_if_held(units: Units, held: dict[str, str]) -> None:
    """Warn if much of the trunk can't be followed, so that later tasks could hardly learn.

    Args:
        units: the units of the trunk.
        held: what `held_whole` of the units returns.
    """
    sizes = {name: p.numel() for name, p in units.trunk.named_parameters() if p.requires_grad}
    wished = {name for name, reason in held.items() if reason.startswith(LEFT)}
    counts = {name: count for name, count in units.held_elements().items() if count and name not in wished}
    share = sum(counts.values()) / max(1, sum(sizes.values()))
    if share > MUCH:
        order = sorted(counts, key=lambda name: -counts[name])
        named = [f"{name} ({held.get(name, f'{counts[name] / sizes[name]:.0%} of it')})" for name in order]
        few = ", ".join(named[:3]) + (f", ... ({len(named)} in all)" if len(named) > 3 else "")
        warnings.warn(f"{share:.0%} of the trunk's weights are held whole after the first task: {few}", stacklevel=3)


def layer_usage(units: Units, used: Tensor, frozen: Tensor) -> dict[str, float]:
    """Return the share of the units of every layer that are used, without layers that the user froze.

    Args:
        units: the units of the trunk.
        used: (units,), 1 for those that are used.
        frozen: (units,), true for those that the user froze.
    """
    layers: dict[str, list[Tensor]] = {}  # a layer that is called twice has units of both calls
    for name, own in units.layers.items():
        if not frozen[own].all():
            layers.setdefault(SECOND_CALL.sub(r"\1", name), []).append(used[own])
    return {name: torch.cat(parts).mean().item() for name, parts in layers.items()}
