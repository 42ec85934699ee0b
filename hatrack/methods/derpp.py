"""DER++: dark experience replay (Buzzega, Boschini, Porrello, Abati, Calderara, 2020), https://arxiv.org/abs/2004.07211

A small memory keeps examples with the logits that the network gave for them in passing. Every step trains on its batch,
pulls the logits of some kept examples back to what they were, and trains on the labels of some others. Departures: the
draws are with replacement, so that the shape of a step never changes; the distance of logits is a mean over those of the
example's own task, as tasks may have heads of different widths.
"""

from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hatrack.methods.fit import Fit
from hatrack.methods.method import Method
from hatrack.methods.parts.memory import Examples, Reservoir, head_sizes, mixing, unused_heads
from hatrack.networks.network import Network
from hatrack.options import Option, check
from hatrack.tasks.split import Batch
from hatrack.tasks.task import Task


class DERpp(Method):
    """Dark experience replay: kept examples are answered with the logits that they had, and with their labels.

    Every step draws twice from a reservoir of examples: for the first draw the logits are pulled back to those that were
    kept (a squared distance, times alpha), for the second the labels are trained on (cross-entropy, times beta).

    Args:
        net: the network; the method trains it in place. The options are listed by `hatrack list derpp`.

    Example:
        >>> method = hr.DERpp(hr.Network(trunk, tasks=tasks), memory=200)
        >>> for task in tasks:
        ...     method.learn(task, hr.Trainer(hr.Regime(epochs=20)))

    See docs/methods/derpp.md for formulas, published values and results.
    """

    targets = "plain"
    splits_batches = False

    step_forms = "many"
    keeps: ClassVar = {"memory": "images"}

    widths: Tensor  # (tasks,): how many logits an example of a task has

    def __init__(
        self,
        net: Network,
        *,
        memory: Annotated[int, Option("slots of the reservoir, for all tasks together", low=1)] = 200,
        alpha: Annotated[float, Option("weight of the squared distance to the logits that were kept", low=0)] = 0.5,
        beta: Annotated[float, Option("weight of the cross-entropy of the labels that were kept", low=0)] = 0.5,
        replay: Annotated[int, Option("examples in each of the two draws of a step", low=1)] = 32,
    ) -> None:
        super().__init__(net)
        self.options = check(DERpp, locals())
        self.alpha, self.beta, self.replay = alpha, beta, replay
        self.memory = Reservoir(memory, net.example, logits=(0,))
        self.register_buffer("widths", torch.zeros_like(self.memory.y[:0]))
        self.unused: list[nn.Parameter] = []  # heads of tasks that have no examples yet; set by `learn_task`
        self.on_new_tasks()

    def on_new_tasks(self) -> None:
        widths = head_sizes(self.net)
        self.widths = torch.tensor(widths, dtype=self.widths.dtype, device=self.widths.device)
        self.memory.widen("logits", max(widths, default=0))

    def learn_task(self, task: Task, fit: Fit) -> None:
        tasks = {task.index, *self.memory.tasks()}
        self.unused = unused_heads(self.net, tasks)
        with mixing(self, DERpp, tasks):
            fit(self, task)

    def forget_task(self, task: int) -> None:
        super().forget_task(task)
        self.memory.forget(task)  # another task may take its number, for which its labels would be wrong

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # the logits are for `edit_grads`
        """Return the loss, in three passes as in the authors' code, so that a batch norm sees each of them by itself."""
        logits = self(batch.x, batch.task)
        filled = self.memory.used.any()
        dark, labelled = self.draw(batch, filled), self.draw(batch, filled)
        drift = self.drift(self(dark.x, dark.task), dark)
        replayed = batch._replace(y=labelled.y, task=labelled.task).loss(self(labelled.x, labelled.task))
        loss = batch.loss(logits) + filled * (self.alpha * drift + self.beta * replayed)
        return loss, logits.detach()

    def draw(self, batch: Batch, filled: Tensor) -> Examples:
        """Draw examples from the memory. While it is empty they have images of the batch, since a batch norm sees them."""
        drawn = self.memory.sample(self.replay)
        own = torch.arange(self.replay, device=batch.y.device) % len(batch.y)
        return drawn._replace(x=torch.where(filled, drawn.x, batch.x[own]))

    def drift(self, logits: Tensor, examples: Examples) -> Tensor:
        """Return the mean squared distance between the logits of each example's own task and those in memory. With one head
        of all classes these are the classes that had been seen when the example was stored."""
        width = self.widths[examples.task]
        own = torch.arange(logits.shape[1], device=logits.device) < width[:, None]  # (replay, logits of the widest task)
        then = examples.more["logits"][:, : logits.shape[1]]
        moved = torch.where(own, logits - then, 0)  # before the square: other places hold huge numbers
        return (moved.square().sum(1) / width).mean()

    def edit_grads(self, batch: Batch, aux: Any) -> None:
        """Offer the batch to the memory in every epoch, so that the stored logits come from all of the training."""
        for parameter in self.unused:
            parameter.grad = None
        table = self.memory.get_buffer("logits")
        logits = F.pad(aux, (0, table.shape[1] - aux.shape[1])).to(table.dtype)  # bfloat16 logits would not fit in
        self.memory.expect(len(batch.y))
        self.memory.add(batch.x, batch.y, batch.task, logits=logits)
