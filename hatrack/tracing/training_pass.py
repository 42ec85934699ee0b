"""What training does to a trunk: buffers it writes, layers that its backward pass computes again, the switch of mode."""

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hatrack.seeds import seeded
from hatrack.tracing.gates import LAYERS, NOT_FOLLOWED, RECURRENT
from hatrack.tracing.norm_calls import NORMS
from hatrack.tracing.opened import OPENED


def written_in_training(trunk: nn.Module, x: Tensor) -> set[str]:
    """Run a training pass, and return the names of the buffers that it writes.

    It raises if the backward pass computes layers again: there, the gates would not be applied.
    """
    before = {name: (buffer, buffer.clone(), count_writes(buffer)) for name, buffer in trunk.named_buffers()}
    with seeded(0, "units"), torch.enable_grad():
        out = trunk.train()(x)
        if not isinstance(out, Tensor):
            raise ValueError(f"in training mode the trunk must return a tensor of features, not {type(out).__name__}")
        if out.requires_grad:
            # From an edge, not from `out`: with a tensor, the mode would handle the whole backward pass as one call, and a
            # mode is off within a call that it handles.
            edge = torch.autograd.graph.get_gradient_edge(out)
            with _NoLayers():
                torch.autograd.backward(edge, torch.ones_like(out))
    now = dict(trunk.named_buffers())
    return {
        name
        for name, (buffer, values, version) in before.items()
        if now.get(name) is not buffer or count_writes(buffer) != version or not torch.equal(buffer, values)
    }


def check_switch(trunk: nn.Module, names: Collection[str] = ()) -> None:
    """Raise an error in one line if a trunk computes tensors from its weights when it is switched to evaluation mode.

    Masks and adapters of a task act in the forward pass, and do not reach what was computed before.

    Args:
        trunk: the trunk.
        names: those of the weights; none: all that are trained.
    """
    own = [type(part).train is not nn.Module.train for part in trunk.modules()]
    if not any(own) and type(trunk).eval is nn.Module.eval:
        return
    try:
        twin = copy.deepcopy(trunk)
    except Exception:  # what it computes shows when it is trained
        return
    weights = [p for name, p in twin.named_parameters() if (name in names if names else p.requires_grad)]
    if found := _written_by_switch(twin, weights):
        raise ValueError(
            f"the trunk computes {found[0]!r} from its weights when eval() is called, where masks and adapters of a task "
            "can't reach: compute it in forward, or take the method independent, which has a trunk per task"
        )


@torch.no_grad()
def _written_by_switch(trunk: nn.Module, weights: list[nn.Parameter]) -> list[str]:
    """Return the tensors of a trunk to which the switch to evaluation mode gives other values if its weights are others."""
    first, second = _after_switch(trunk, weights), _after_switch(trunk, weights)
    return [name for name in first if name in second and not _same(first[name], second[name])]


def _after_switch(trunk: nn.Module, weights: list[nn.Parameter]) -> dict[str, Tensor]:
    """Change the weights, and return the values of the tensors that the switch to evaluation mode changes."""
    trunk.eval()
    for weight in weights:
        weight.mul_(2).add_(1)
    trunk.train()
    before = {name: (t, t.clone()) for name, t in (*trunk.named_parameters(), *trunk.named_buffers())}
    trunk.eval()
    return {name: t.clone() for name, (t, old) in before.items() if not _same(t, old)}


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, 0, 0, equal_nan=True)


class _NoLayers(TorchFunctionMode):
    """While this mode is active, calling a layer is an error."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func in LAYERS or func in RECURRENT or func in OPENED or func in NORMS
        ) and torch.is_grad_enabled():  # without: the backward pass of an operation of the user's own
            raise ValueError(
                "the trunk computes layers again in the backward pass (gradient checkpointing), which cannot be traced; "
                f"{NOT_FOLLOWED}"
            )
        return func(*args, **(kwargs or {}))


def count_writes(tensor: Tensor) -> int:
    """Return how often a tensor was written in place, but for writes through `.data`; 0 in the inference mode."""
    return 0 if tensor.is_inference() else tensor._version
