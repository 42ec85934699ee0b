"""One task of a method as a module by itself, for serving: any number of threads may call it at the same time.

A method's own `forward` exchanges tensors within the network while it runs, and so lets one thread in at a time. Here the
tensors of the task are written into a copy of the network, once.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn

from hatrack.networks.network import Network
from hatrack.tracing.units import Units

if TYPE_CHECKING:
    from hatrack.methods.method import Method


class ServedTask(nn.Module):
    """A module of one task. It is a copy, in evaluation mode for good: nothing that the method learns later changes it."""

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode."""
        return super().train(False)


class ServedNetwork(ServedTask):
    """The trunk and the head of one task.

    Args:
        net: the network, which is copied.
        task: the number of the task.
        exchanged: the tensors that the task uses in place of the network's own, by name.
        units: the units of the trunk, if they have gates.
        gates: (units,), the gates of the task.
        trunk: a trunk that is used in place of a copy of the network's own, with all tensors of the task.
    """

    gates: Tensor | None

    def __init__(
        self,
        net: Network,
        task: int,
        exchanged: Mapping[str, Tensor],
        units: Units | None = None,
        gates: Tensor | None = None,
        trunk: nn.Module | None = None,
    ) -> None:
        super().__init__()
        own = copy.deepcopy(net).requires_grad_(False)
        tensors = dict(own.named_parameters()) | dict(own.named_buffers())
        for name, tensor in exchanged.items():
            tensors[name].copy_(tensor.detach())
        self.trunk, self.head = (
            own.trunk if trunk is None else trunk.requires_grad_(False),
            own.heads[0 if net.shared else task],
        )
        if net.incremental:
            self.head = joined(list(own.heads)[: task + 1])
        self.units = None if units is None else units.on_copy(self.trunk)
        self.register_buffer("gates", None if gates is None else gates.detach().clone())
        self.eval()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move also the tables of units, when `.to(device)` is called."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.units is not None and self.gates is not None:
            self.units.to(self.gates.device)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the task for images as the network sees them."""
        features = self.trunk(x) if self.units is None or self.gates is None else self.units.run(x, self.gates)
        kind = self.head.get_parameter("weight").dtype
        if features.dtype != kind and not torch.is_autocast_enabled(features.device.type):  # as in Network.head
            features = features.to(kind)
        return self.head(features)  # type: ignore[no-any-return]


@torch.no_grad()
def joined(heads: Sequence[nn.Module]) -> nn.Linear:
    """Return one linear layer with the rows of several."""
    weights, biases = (list[Tensor](head.get_parameter(name) for head in heads) for name in ("weight", "bias"))
    inputs, outputs = weights[0].shape[1], sum(map(len, weights))
    joint = nn.Linear(inputs, outputs, device="meta").to_empty(device=weights[0].device).to(weights[0])  # draws no numbers
    joint.weight.copy_(torch.cat(weights))
    joint.bias.copy_(torch.cat(biases))
    return joint.requires_grad_(False)


class ServedMethod(ServedTask):
    """A copy of a whole method, of which one task is asked. If its `forward` exchanges tensors, threads run in turn."""

    def __init__(self, method: "Method", task: int) -> None:
        super().__init__()
        self.method, self.task = copy.deepcopy(method).requires_grad_(False), task
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the task for images as the network sees them."""
        run = self.method if self.method.exchanges else self.method.forward
        return run(x, self.task)
