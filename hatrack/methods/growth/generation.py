"""A generation: the trunk at an earlier width, for the tasks learned at it. Its weights are slices of the present trunk's.

A product of wide matrices rounds otherwise than that of narrow ones, so a finished task must run at the width it was learned
at, on contiguous copies. The generation's modules have no weights of their own: these are copied out of the wider trunk for
every forward pass. Its norms and buffers, which the first task uses, are kept as they were.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor, nn

from hatrack.methods.growth.mapping import Places
from hatrack.networks.network import Network
from hatrack.tracing.exchange import filled, functional_call
from hatrack.tracing.units import Units


class Generation(nn.Module):
    """The trunk at an earlier width.

    Args:
        trunk: the trunk as it was; its modules are copied.
        units: its units.
        places: where its weights lie in the present trunk.
        norms: the names of its tensors that each task has for itself.
        features: the width of its feature vector.
    """

    def __init__(self, trunk: nn.Module, units: Units, places: Places, norms: Sequence[str], features: int) -> None:
        super().__init__()
        buffers = dict(trunk.named_buffers())
        hidden = buffers.keys() - trunk.state_dict().keys()
        self.own = {name: f"n{k}" for k, name in enumerate([*norms, *(name for name in buffers if name not in norms)])}
        tensors = {**dict(trunk.named_parameters()), **buffers}
        for name, key in self.own.items():
            value = tensors[name].detach().clone()
            if isinstance(tensors[name], nn.Parameter):
                self.register_parameter(key, nn.Parameter(value, tensors[name].requires_grad))
            else:
                self.register_buffer(key, value, persistent=name not in hidden)
        # In a list, so that it is no part of this module: it has no values that could be moved, counted or saved.
        self._tree = [without_values(trunk)]
        self.units, self.places, self.features = units.on_copy(self.tree), places, features

    @property
    def tree(self) -> nn.Module:
        """The modules of the trunk, whose tensors have no values."""
        return self._tree[0]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move also the places and the tables of units, when `.to(device)` is called."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = fn(torch.zeros(0)).device
        self.places = self.places.to(device)
        self.units.to(device)
        return self

    def tensors(self, present: nn.Module) -> dict[str, Tensor]:
        """Return all tensors of the trunk at this width, by name.

        Args:
            present: the present trunk.
        """
        found, own = {}, dict(self.named_parameters()) | dict(self.named_buffers())
        wide = {**dict(present.named_parameters()), **dict(present.named_buffers())}
        for name, old in [*self.tree.named_parameters(), *self.tree.named_buffers()]:
            if name in self.own:
                found[name] = own[self.own[name]]
            else:
                part = self.places.narrow(name, wide[name])
                found[name] = part if part is wide[name] else _copied(part, old)
        return found

    def reset(self, values: Mapping[str, Tensor]) -> None:
        """Give tensors of its own other values, which are those of the present trunk, by name. The old tensors are left as
        they are, so that all can be undone."""
        for name, wide in values.items():
            old, value = getattr(self, self.own[name]), self.places.narrow(name, wide).detach().clone()
            setattr(self, self.own[name], nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value)

    def run(self, net: Network, x: Tensor, tensors: Mapping[str, Tensor], gates: Tensor | None = None) -> Tensor:
        """Return the features of images.

        Args:
            net: the network, with the present trunk.
            x: a batch of images as the network sees them.
            tensors: tensors of a task, in place of those of `tensors`.
            gates: (units of the present trunk,), the gates of the task, if its method has some.
        """
        if self.tree.training != net.trunk.training:
            self.tree.train(net.trunk.training)
            net.keep_frozen(self.tree)
        used = {**self.tensors(net.trunk), **tensors}
        if gates is None:
            return functional_call(self.tree, used, (x,))  # type: ignore[no-any-return]
        return self.units.run(x, gates[self.places.units], used)

    def filled(self, net: Network, tensors: Mapping[str, Tensor]) -> nn.Module:
        """Return a copy of the trunk at this width with values; `tensors` are those of a task."""
        return filled(self.tree, {**self.tensors(net.trunk), **tensors})


def _copied(part: Tensor, old: Tensor) -> Tensor:
    """Return a slice in the order of memory that the narrow tensor had: torch chooses kernels by it, and by whether a
    gradient is required."""
    if part.stride() != old.stride():
        part = torch.empty_strided(old.shape, old.stride(), dtype=part.dtype, device=part.device).copy_(part)
    return part if torch.is_grad_enabled() else part.requires_grad_(old.requires_grad)


def without_values(trunk: nn.Module) -> nn.Module:
    """Return a copy of a trunk whose parameters and buffers have shapes and strides, but no values."""
    shells = {name: torch.empty_like(t, device="meta") for name, t in [*trunk.named_parameters(), *trunk.named_buffers()]}
    return filled(trunk, shells)
