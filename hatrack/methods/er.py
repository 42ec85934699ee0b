"""ER: experience replay from a tiny memory (Chaudhry, Rohrbach, Elhoseiny et al., 2019), https://arxiv.org/abs/1902.10486

Every step trains on its batch joined with one drawn from memory, and then offers its batch to the memory. Departures: the
draw is with replacement, so that the shape of a step never changes; an example is offered in the first epoch only.
"""

from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hatrack.methods.fit import Fit
from hatrack.methods.method import Method
from hatrack.methods.parts.memory import Memory, Reservoir, Ring, idle, room
from hatrack.networks.network import Network
from hatrack.options import Option, check
from hatrack.tasks.split import Batch
from hatrack.tasks.task import Task


class ER(Method):
    """Experience replay: every batch is joined by some examples from a small memory of all that was seen."""

    def __init__(
        self,
        net: Network,
        *,
        kind: Annotated[
            Literal["reservoir", "ring"],
            Option("what is kept: every example seen with the same chance, or the last ones of every class of every task"),
        ] = "reservoir",
        memory: Annotated[int, Option("slots of the reservoir, for all tasks together", low=1)] = 200,
        per_class: Annotated[int, Option("slots of the ring, for each class of each task", low=1)] = 1,
        replay: Annotated[int, Option("examples from memory in every step", low=1)] = 10,
    ) -> None:
        super().__init__(net)
        self.options = check(ER, locals())
        self.replay = replay
        self.memory: Memory = Reservoir(memory, net.example) if kind == "reservoir" else Ring(per_class, net.example)
        self.idle: list[nn.Parameter] = []  # heads that nothing trains now; set anew by `learn`
        self.grow()

    def grow(self) -> None:
        self.memory.grow(room(self.net))

    def learn_task(self, task: Task, fit: Fit) -> None:
        self.memory.expect(len(task.train))
        self.idle = idle(self.net, {task.index, *self.memory.tasks()})
        fit(self, task)

    def loss(self, batch: Batch) -> Tensor:
        """The mean over the batch and what is replayed, in one forward pass; of the batch alone while nothing is kept."""
        x, y, task, _ = self.memory.sample(self.replay)
        there = self.memory.used.any()
        own = torch.arange(self.replay, device=y.device) % len(batch.y)
        x = torch.where(there, x, batch.x[own])  # blank images would be seen by the statistics of a batch norm
        owner = batch.task if isinstance(batch.task, Tensor) else torch.full_like(batch.y, batch.task)
        logits = self(torch.cat([batch.x, x]), torch.cat([owner, task]))
        losses = F.cross_entropy(logits, torch.cat([batch.y, y]), reduction="none")
        weight = torch.cat([torch.ones_like(batch.y), there.to(y.dtype).expand_as(y)])
        return (losses * weight).sum() / weight.sum()

    def edit_grads(self, batch: Batch, aux: Any) -> None:
        """The batch is offered to the memory once its loss is known, as in the paper."""
        for parameter in self.idle:
            parameter.grad = None
        self.memory.add(batch.x, batch.y, batch.task)
