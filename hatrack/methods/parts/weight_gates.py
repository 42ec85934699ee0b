"""The final gates of single weights, as PMASK has them: their form in memory, whose they are, what tasks use by them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hatrack.methods.parts.annealing import Masks
from hatrack.methods.parts.bits import pack, unpack
from hatrack.methods.parts.masked_weights import soft_gates
from hatrack.methods.parts.task_norms import TaskNorms
from hatrack.methods.parts.used_tensors import used_of_network
from hatrack.methods.parts.vectors import pieces
from hatrack.networks.network import Network

if TYPE_CHECKING:
    from hatrack.methods.growth.wider import Wider
    from hatrack.methods.pmask import PMASK


@dataclass(frozen=True)
class FinalGates:
    """What the gates of finished tasks are: exactly 0 or 1, as bools that are stored as bits; or soft, as numbers.

    Args:
        kind: "binary" or "soft".
        smax: the hardness of soft ones.
    """

    kind: Masks
    smax: float

    def of(self, e: Tensor) -> Tensor:
        """Return the gates (weights,) of embeddings: whether they are above 0, or sigmoid(smax e) (Eq. 1)."""
        return e > 0 if self.kind == "binary" else soft_gates(e.detach(), self.smax)

    def store(self, gates: Tensor) -> Tensor:
        """Return gates (weights,) as they are stored: (bytes,), or (weights,) if they are soft."""
        return pack(gates) if self.kind == "binary" else gates

    def read(self, row: Tensor, count: int) -> Tensor:
        """Return so many gates from what is stored."""
        return unpack(row, count) if self.kind == "binary" else row

    def largest(self, rows: Tensor, count: int) -> Tensor:
        """Return the largest gate (weights,) of several tasks for every weight: of bools whether any task has it."""
        most = rows.new_zeros(rows.shape[1])
        for row in rows:
            most = most | row if self.kind == "binary" else torch.maximum(most, row)
        return self.read(most, count)

    def times(self, gate: Tensor, weight: Tensor) -> Tensor:
        """Return a weight times its gates; a closed one selects 0, so that not even an infinity passes."""
        return torch.where(gate, weight, 0) if self.kind == "binary" else (weight * gate).to(weight.dtype)


def gated_names(net: Network, norms: TaskNorms) -> list[str]:
    """Return the names of the parameters that have gates: of the trunk without its norms, and of a shared head."""
    without = {f"trunk.{name}" for name in norms.names}
    parts = ("trunk.", "heads.") if net.shared else ("trunk.",)
    trained = [name for name, p in net.named_parameters() if p.requires_grad and name.startswith(parts)]
    if not set(trained) - without:
        raise ValueError("pmask has no weights to mask: every part of the trunk is frozen")
    return [name for name in trained if name not in without]


def gates_by_name(method: "PMASK", gates: Tensor) -> dict[str, Tensor]:
    """Return gates (weights,) in the shapes of their parameters, by their names in the trunk."""
    named = zip(method.names, pieces(gates, method.weights()), strict=True)
    return {name.removeprefix("trunk."): part for name, part in named}


def used_weights(method: "PMASK", task: int) -> dict[str, Tensor]:
    """Return all tensors that a finished task with binary gates uses, for `used_by`: its weights, gates, norms and head."""
    own = {f"trunk.{name}": tensor for name, tensor in method.norms.of(task).items()}
    own |= dict(zip(method.names, method.gated_weights(task), strict=True))
    if (old := method.growth_of(task)) is None:
        return {**used_of_network(method.net, task, own), "gates": method.packed_masks[task]}
    named = gates_by_name(method, method.final_gates(task))  # all at the width that the task was learned at
    gates = [old.places.narrow(name, gate).flatten() for name, gate in named.items()]
    return {**used_of_network(method.net, task, own, old.tensors(method.net.trunk)), "gates": pack(torch.cat(gates))}


def widened_masks(method: "PMASK", masks: list[list[Tensor]], wider: "Wider") -> Tensor:
    """Return the packed masks of a wider trunk. Finished tasks use none of its new weights; the others begin anew.

    Args:
        method: the method, whose weights are the wider ones already.
        masks: for every task its gates at the width before, by parameter.
        wider: the wider trunk.
    """
    rows = [method.initial_gates(task) for task in range(len(masks))]
    for task in method.done.nonzero().flatten().tolist():
        rows[task] = torch.zeros_like(rows[task])
        wide = gates_by_name(method, rows[task])  # views of the row
        for (name, values), mask in zip(wide.items(), masks[task], strict=True):
            wider.places.put(name, values, mask)
    return torch.stack([pack(row) for row in rows]) if rows else pack(torch.zeros(method.count))[None][:0]


def unpacked_masks(method: "PMASK") -> list[list[Tensor]]:
    """Return the gates of every task by parameter, at the width that the trunk had before it was widened last."""
    assert method.growth is not None
    before = method.growth.all()[-1][0].tree
    shapes = [before.get_parameter(name.removeprefix("trunk.")) for name in method.names]
    return [pieces(unpack(row, method.count), shapes) for row in method.packed_masks]
