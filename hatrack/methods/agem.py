"""A-GEM: averaged gradient episodic memory (Chaudhry, Ranzato, Rohrbach, Elhoseiny, ICLR 2019), https://arxiv.org/abs/1812.00420

A step may not raise, to first order, the loss on a random batch from the memory of all earlier tasks. If its gradient points
against the gradient of that batch, it is projected: the component along that gradient is removed. The memory of a task is
filled from its training set when the task is finished, since nothing reads it before.
"""

from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hatrack.methods.fit import Fit
from hatrack.methods.method import Method
from hatrack.methods.parts.memory import Ring, grow_with, mixing, unused_heads
from hatrack.methods.parts.vectors import grads, set_grads, values
from hatrack.networks.network import Network
from hatrack.options import Option, check
from hatrack.seeds import generator
from hatrack.tasks.split import Batch
from hatrack.tasks.task import Task

CHUNK = 256  # images that are added to the memory at a time


class AGEM(Method):
    """Averaged gradient episodic memory: no step goes against the mean gradient of what is remembered.

    A memory has a few examples of every class of every earlier task. In every step, the gradient on a random batch of these
    is compared with the gradient of the step. If both point in opposite directions, the conflicting part is removed.

    Args:
        net: the network; the method trains it in place. The options are listed by `hatrack list agem`.

    Example:
        >>> method = hr.AGEM(hr.Network(trunk, tasks=tasks), per_class=25)
        >>> for task in tasks:
        ...     method.learn(task, hr.Trainer(hr.Regime(epochs=20)))

    See docs/methods/agem.md for formulas, published values and results.
    """

    targets = "plain"
    splits_batches = False

    step_forms = "many"
    keeps: ClassVar = {"memory": "images"}

    def __init__(
        self,
        net: Network,
        *,
        per_class: Annotated[int, Option("images kept of each class of each task", low=1)] = 25,
        reference: Annotated[int, Option("images from memory that the reference gradient is taken on", low=2)] = 256,
    ) -> None:
        super().__init__(net)
        self.options = check(AGEM, locals())
        self.per_class, self.reference = per_class, reference
        self.memory = Ring(per_class, net.example)
        self.projected: list[nn.Parameter] = []  # parameters whose gradient is projected; it and the next by `learn_task`
        self.earlier = self.memory.without(0)  # the rows of earlier tasks
        self.on_new_tasks()

    def on_new_tasks(self) -> None:
        grow_with(self.memory, self.net)

    def forget_task(self, task: int) -> None:
        super().forget_task(task)
        self.memory.forget(task)  # another task may take its number, for which its labels would be wrong

    def learn_task(self, task: Task, fit: Fit) -> None:
        earlier = self.memory.tasks() - {task.index}
        tasks = {task.index, *earlier}
        unused = {id(p) for p in unused_heads(self.net, tasks)}
        trained = [p for p in self.parameters() if p.requires_grad and id(p) not in unused]
        self.projected = trained if earlier else []  # the first task is plain SGD
        self.earlier = self.memory.without(task.index)
        with mixing(self, AGEM, tasks):
            fit(self, task)
        self._add_to_memory(task)

    def _add_to_memory(self, task: Task) -> None:
        """Add some examples of each class. If the task was learned before, they replace the old ones."""
        chosen = draw_per_class(task.train.y, self.per_class, generator(self.net.seed, "memory", task.index))
        self.memory.forget(task.index)
        self.memory.expect(len(chosen))
        for index in torch.split(chosen, CHUNK):
            self.memory.add(task.train.inputs(index), task.train.y[index], task.index)

    def edit_grads(self, batch: Batch, aux: Any) -> None:
        """Project the gradient of the batch so that it does not point against that of a batch from memory."""
        if not self.projected:
            return
        x, y, tasks, _ = self.memory.sample(self.reference, self.earlier)
        projected = self.net.packed.replace(self.projected) if self.net.packed else self.projected
        with torch.enable_grad():
            loss = F.cross_entropy(self(x, tasks), y)
            reference = torch.autograd.grad(loss, projected, allow_unused=True, materialize_grads=True)
        for parameter in projected:  # the batch gives heads of earlier tasks no gradient, but the projection may
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        set_grads(projected, project(grads(projected), values(reference)))


def project(gradient: Tensor, reference: Tensor) -> Tensor:
    """Return g - (g.r / r.r) r if g.r < 0, else g.

    The length of r does not matter, so r is scaled first: then no square of a small number becomes 0.
    """
    r = reference / reference.abs().amax().clamp(min=torch.finfo(reference.dtype).tiny)
    along, square = (gradient * r).sum(dtype=torch.float64), (r * r).sum(dtype=torch.float64)
    return torch.where(along < 0, gradient - (along / square).to(r.dtype) * r, gradient)


def draw_per_class(y: Tensor, count: int, source: torch.Generator) -> Tensor:
    """Return the numbers of `count` random examples of every class, or of all that a class has."""
    order = torch.randperm(len(y), generator=source).to(y.device)
    return torch.cat([order[y[order] == label][:count] for label in range(int(y.max()) + 1)])
