"""How much of every layer tasks use, and warnings about it: little that is free, and much that is held whole."""

import re
import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hatrack.text import SCARCE, is_held
from hatrack.tracing.units import LEFT, Units

if TYPE_CHECKING:
    from hatrack.methods.method import Method

MUCH = 0.2  # of the trunk's weights: if more is held whole, a warning says so
SECOND_CALL = re.compile(r"^(.*[^)]) \(call \d+\)$")  # of a layer with a name, not of a function


def warn_of_trunk(units: Units, held: dict[str, str]) -> None:
    """Warn if much of the trunk can't be followed, so that later tasks could hardly learn, or depends on single images.

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
    if units.reads:
        warnings.warn(
            f"the trunk reads values of its input into Python ({'; '.join(units.reads[:3])}): what follows may "
            "differ between images, so that more weights than usual are frozen after every task",
            stacklevel=3,
        )


def warn_if_full(method: "Method", task: str) -> None:
    """Warn if little is free in some layers for a task of this name; it is learned all the same."""
    taken = {layer: share for layer, share in method.usage().items() if not is_held(layer)}
    scarce = [f"{layer} ({1 - share:.0%})" for layer, share in taken.items() if 1 - share < SCARCE]
    if scarce:
        which = ", ".join(scarce[:3]) + (" ..." if len(scarce) > 3 else "")
        counts = f"{len(scarce)} of {len(taken)} layers: {which}"
        warnings.warn(f"task {task!r} finds under {SCARCE:.0%} free in {counts}", stacklevel=4)


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
