"""The weights between units that have gates: which of them tasks share, how far gates use each, and those of one task."""

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hatrack.methods.parts.used_tensors import used_of_network
from hatrack.networks.network import Network
from hatrack.tracing.units import Units

if TYPE_CHECKING:
    from hatrack.methods.hat import HAT


def shared_weights(net: Network, units: Units) -> dict[str, nn.Parameter]:
    """Return the parameters that tasks share and train, by name: of the trunk without norms, and of a shared head."""
    trunk = {f"trunk.{name}": p for name, p in net.trunk.named_parameters() if name in units.traced}
    head = {f"heads.0.{name}": p for name, p in net.heads[0].named_parameters()} if net.shared else {}
    return {name: p for name, p in (trunk | head).items() if p.requires_grad}


def weight_shares(method: "HAT", tasks: list[Tensor], *, together: bool = False) -> dict[str, Tensor]:
    """Return how far any of these gates use each shared weight, from 0 to 1, by the name of the parameter.

    Args:
        method: the method.
        tasks: the gates (units,) of tasks that were learned at the present width. The others count as well.
        together: those that were learned at an earlier width use the weights between units that any of them uses.
    """
    shares = {name: torch.zeros(p.shape, device=p.device) for name, p in shared_weights(method.net, method.units).items()}
    for masks in chain(_masks_of_gates(method, tasks), _masks_of_generations(method, together=together)):
        shares = {name: torch.maximum(share, masks[name].to(share.device)) for name, share in shares.items()}
    return shares


def _masks_of_gates(method: "HAT", tasks: list[Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield how far the gates of each task use each shared weight."""
    for gates in tasks:
        masks = {f"trunk.{name}": mask for name, mask in method.units.weight_masks(gates, near=True).items()}
        # All tasks use the outputs of a shared head; a head per task needs no protection.
        yield masks | {"heads.0.weight": method.units.feature_masks(gates.cpu()), "heads.0.bias": torch.ones(())}


def _masks_of_generations(method: "HAT", *, together: bool) -> Iterator[dict[str, Tensor]]:
    """Yield masks of the weights that tasks use which were learned at an earlier width, in the shapes of the present trunk.

    Args:
        method: the method, with a gate per unit.
        together: all weights between units that any task of a generation uses; otherwise a mask per task.
    """
    assert method.growth is not None
    shapes = {name: p.shape for name, p in method.net.trunk.named_parameters()}
    for old, tasks in method.growth.all():
        finished = [method.gates[t][old.places.units].float() for t in tasks if method.done[t]]
        for gates in [torch.stack(finished).amax(0)] if finished and together else finished:
            wide = {name: torch.zeros(shape) for name, shape in shapes.items()}
            for name, mask in old.units.weight_masks(gates).items():
                old.places.to(mask.device).put(name, wide[name], mask)
            yield {f"trunk.{name}": mask for name, mask in wide.items()}


def used_weights(method: "HAT", task: int) -> dict[str, Tensor]:
    """Return all tensors that a finished task with binary gates uses, for `used_by`: the weights between its units, and its
    gates, norms and head."""
    net, old, units, gates = method.net, method.growth_of(task), method.units, method.gates[task]
    trunk: dict[str, Tensor] = dict(net.trunk.named_parameters())
    tensors = None
    if old is not None:  # all at the width that it was learned at
        trunk = tensors = old.tensors(net.trunk)
        units, gates = old.units, gates[old.places.units]
    shares = units.weight_masks(gates, near=True)
    masks = {name: share.bool() for name, share in shares.items() if name in units.traced}  # they are 0 or 1
    own = {f"trunk.{name}": torch.where(mask.to(trunk[name].device), trunk[name], 0) for name, mask in masks.items()}
    own |= {f"trunk.{name}": tensor for name, tensor in method.norms.of(task).items()}
    if net.shared:
        weight = net.heads[0].get_parameter("weight")
        read = method.units.feature_masks(gates.float().cpu()) == 1
        own["heads.0.weight"] = torch.where(read.to(weight.device), weight, 0)
    return {**used_of_network(net, task, own, tensors), "gates": gates}
