"""A-GEM: averaged gradient episodic memory (Chaudhry, Ranzato, Rohrbach, Elhoseiny, ICLR 2019), https://arxiv.org/abs/1812.00420

A step may not raise, to first order, the loss on a random batch from the memory of all earlier tasks: if its gradient points
against the gradient of that batch, the part along it is taken out. The memory of a task is filled when the task is finished,
by drawing from its training set, since nothing reads it before.
"""

from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hatrack.methods.fit import Fit
from hatrack.methods.method import Method
from hatrack.methods.parts.memory import Ring, idle, room
from hatrack.methods.parts.vectors import grads, set_grads, values
from hatrack.networks.network import Network
from hatrack.options import Option, check
from hatrack.seeds import generator
from hatrack.tasks.split import Batch
from hatrack.tasks.task import Task

CHUNK = 256  # images that are brought into the memory at once


class AGEM(Method):
    """Averaged gradient episodic memory: no step goes against the mean gradient of what is remembered."""

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
        self.guarded: list[nn.Parameter] = []  # what is projected; empty without earlier tasks; set anew by `learn`
        self.grow()

    def grow(self) -> None:
        self.memory.grow(room(self.net))

    def learn_task(self, task: Task, fit: Fit) -> None:
        earlier = self.memory.tasks() - {task.index}
        unused = {id(p) for p in idle(self.net, {task.index, *earlier})}
        trained = [p for p in self.parameters() if p.requires_grad and id(p) not in unused]
        self.guarded = trained if earlier else []
        fit(self, task)
        self._remember(task)

    def _remember(self, task: Task) -> None:
        """Some examples of each class, in place of those that an earlier time left."""
        chosen = some_of_each(task.train.y, self.per_class, generator(self.net.seed, "memory", task.index))
        self.memory.forget(task.index)
        self.memory.expect(len(chosen))
        for index in torch.split(chosen, CHUNK):
            self.memory.add(task.train.inputs(index), task.train.y[index], task.index)

    def edit_grads(self, batch: Batch, aux: Any) -> None:
        if not self.guarded:
            return
        assert isinstance(batch.task, int), "A-GEM learns one task at a time"
        x, y, owner, _ = self.memory.sample(self.reference, without=batch.task)
        with torch.enable_grad():
            loss = F.cross_entropy(self(x, owner), y)
            reference = torch.autograd.grad(loss, self.guarded, allow_unused=True, materialize_grads=True)
        for parameter in self.guarded:  # heads of earlier tasks: the batch does not move them, but the projection may
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        set_grads(self.guarded, project(grads(self.guarded), values(reference)))


def project(gradient: Tensor, reference: Tensor) -> Tensor:
    """g - (g.r / r.r) r where g.r < 0, else g as it is: the length of r does not matter, so no square may vanish."""
    r = reference / reference.abs().amax().clamp(min=torch.finfo(reference.dtype).tiny)
    along, square = (gradient * r).sum(dtype=torch.float64), (r * r).sum(dtype=torch.float64)
    return torch.where(along < 0, gradient - (along / square).to(r.dtype) * r, gradient)


def some_of_each(y: Tensor, each: int, source: torch.Generator) -> Tensor:
    """The numbers of `each` random examples of every class, or of all that it has."""
    order = torch.randperm(len(y), generator=source).to(y.device)
    return torch.cat([order[y[order] == label][:each] for label in range(int(y.max()) + 1)])
