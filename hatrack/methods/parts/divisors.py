"""Parameters that a trunk divides by, such as a learned temperature: a closed gate, or pruning, would make them 0."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hatrack.networks.network import Network
from hatrack.seeds import seeded
from hatrack.tracing.wrappers import copied


class _Finite(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes for every operation whether its results are finite."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler (seconds) for the first operation under this mode."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.finite: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.Tag.pointwise in func.tags:
            self.finite.append(all(bool(t.isfinite().all()) for t in tree_leaves(out) if isinstance(t, Tensor)))
        return out


@torch.no_grad()
def divisors(net: Network, names: Collection[str] | None = None) -> list[str]:
    """Return the names of the trunk's parameters that give infinite or undefined values when they are 0.

    Args:
        net: the network.
        names: the parameters to try; None: all trained scalars and vectors.
    """
    twin = copied(net.trunk, net.example)
    small = {name: p for name, p in twin.named_parameters() if p.requires_grad and p.numel() == max(p.shape, default=1)}
    tried = small if names is None else {name: twin.get_parameter(name) for name in names}
    before = _finite(twin, net.example)

    def breaks(parameters: list[nn.Parameter]) -> bool:
        """Return whether some result is no longer finite if these are 0."""
        old = [p.clone() for p in parameters]
        for p in parameters:
            p.zero_()
        try:
            after = _finite(twin, net.example)
        except Exception:  # such as the inverse of a matrix of zeros, or a check of the trunk's own
            after = [False] * len(before)
        for p, value in zip(parameters, old, strict=True):
            p.copy_(value)
        return len(after) == len(before) and any(was and not now for was, now in zip(before, after, strict=True))

    return [name for name, p in tried.items() if breaks([p])] if tried and breaks(list(tried.values())) else []


def _finite(trunk: nn.Module, x: Tensor) -> list[bool]:
    """Return for every pointwise operation of a forward pass, and for the features, whether the results are finite."""
    mode = _Finite()
    with seeded(0, "divisors"), mode:
        features = trunk(x)
    return [*mode.finite, bool(features.isfinite().all())]
