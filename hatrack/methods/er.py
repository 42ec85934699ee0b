"""ER: experience replay from a tiny memory (Chaudhry, Rohrbach, Elhoseiny et al., 2019), https://arxiv.org/abs/1902.10486

Every step trains on its batch together with examples from the memory, and then offers its batch to the memory. Departures
from the paper: examples are drawn with replacement, so that the shapes of a step never change; an example is offered to the
memory in the first epoch only.
"""

from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from hatrack.methods.fit import Fit
from hatrack.methods.method import Method
from hatrack.methods.parts.memory import Memory, Reservoir, Ring, grow_with, mixing, unused_heads
from hatrack.networks.network import Network
from hatrack.options import Option, check
from hatrack.tasks.split import Batch
from hatrack.tasks.targets import cross_entropies
from hatrack.tasks.task import Task


class ER(Method):
    """Experience replay: every batch is joined by some examples from a small memory of all that was seen.

    The memory is a reservoir, in which every example seen so far is with the same probability, or a ring buffer per class.
    The loss is the mean over the batch and the replayed examples.

    Args:
        net: the network; the method trains it in place. The options are listed by `hatrack list er`.

    Example:
        >>> method = hr.ER(hr.Network(trunk, tasks=tasks), memory=200)
        >>> for task in tasks:
        ...     method.learn(task, hr.Trainer(hr.Regime(epochs=20)))

    See docs/methods/er.md for formulas, published values and results.
    """

    targets = "plain"
    splits_batches = False

    step_forms = "many"
    keeps: ClassVar = {"memory": "images"}

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
        self.unused: list[nn.Parameter] = []  # heads of tasks that have no examples yet; set by `learn_task`
        self.on_new_tasks()

    def on_new_tasks(self) -> None:
        grow_with(self.memory, self.net)

    def learn_task(self, task: Task, fit: Fit) -> None:
        self.memory.expect(len(task.train))
        tasks = {task.index, *self.memory.tasks()}
        self.unused = unused_heads(self.net, tasks)
        with mixing(self, ER, tasks):
            fit(self, task)

    def forget_task(self, task: int) -> None:
        super().forget_task(task)
        self.memory.forget(task)  # another task may take its number, for which its labels would be wrong

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean loss over the batch and the replayed examples, or over the batch alone if the memory is empty.

        The shapes are always the same: while the memory is empty, some images of the batch are repeated with weight 0.
        (Blank images would change the statistics of a batch norm.)
        """
        x, y, task, _ = self.memory.sample(self.replay)
        filled = self.memory.used.any()
        repeated = torch.arange(self.replay, device=y.device) % len(batch.y)
        x = torch.where(filled, x, batch.x[repeated])
        batch_task = batch.task if isinstance(batch.task, Tensor) else torch.full_like(batch.y, batch.task)
        logits = self(torch.cat([batch.x, x]), torch.cat([batch_task, task]))
        losses = cross_entropies(logits, torch.cat([batch.y, y]), batch.target.smoothing)
        weight = torch.cat([torch.ones_like(batch.y), filled.to(y.dtype).expand_as(y)])
        return (losses * weight).sum() / weight.sum()

    def edit_grads(self, batch: Batch, aux: Any) -> None:
        """Offer the batch to the memory after its loss was computed, as in the paper."""
        for parameter in self.unused:
            parameter.grad = None
        self.memory.add(batch.x, batch.y, batch.task)
