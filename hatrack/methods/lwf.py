"""LwF: learning without forgetting (Li, Hoiem, ECCV 2016), https://arxiv.org/abs/1606.09282

While a task is learned, the network as it was before it answers the new images with the heads of the earlier tasks, and
the new network is asked to answer the same. That old network is nothing to remember: it is what `learn` begins with.
"""

import copy
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from hatrack.methods.fit import Fit
from hatrack.methods.method import Method
from hatrack.networks.network import Network
from hatrack.options import Option, check
from hatrack.tasks.split import Batch
from hatrack.tasks.task import Task


class LwF(Method):
    """Learning without forgetting: on the images of a new task, the earlier tasks' heads go on answering as before."""

    learned: Tensor

    def __init__(
        self,
        net: Network,
        *,
        strength: Annotated[float, Option("weight of the old answers: larger forgets less and learns less", low=0)] = 2.0,
        temperature: Annotated[float, Option("above 1 the less likely classes of an answer count for more", above=0)] = 1.0,
    ) -> None:
        super().__init__(net)
        self.options = check(LwF, locals())
        self.strength, self.temperature = strength, temperature
        self.register_buffer("learned", torch.zeros(0, dtype=torch.bool, device=net.example.device))  # (tasks,)
        self.earlier: list[int] = []  # the tasks whose heads are to answer as before; it and the next are set by `learn`
        self.teacher: list[Network] = []  # in a list, so that it is no part of what is trained, kept or counted
        self.grow()

    def grow(self) -> None:
        fresh = len(self.net.classes) - len(self.learned)
        if fresh:
            self.learned = torch.cat([self.learned, self.learned.new_zeros(fresh)])

    def learn_task(self, task: Task, fit: Fit) -> None:
        earlier = [k for k, learned in enumerate(self.learned.tolist()) if learned and k != task.index]
        self.earlier = earlier[:1] if self.net.shared else earlier  # a shared head has one answer for all of them
        self.teacher = [copy.deepcopy(self.net).eval().requires_grad_(False)] if earlier else []
        fit(self, task)
        self.learned[task.index] = True

    def end_learning(self) -> None:
        self.earlier, self.teacher = [], []

    def loss(self, batch: Batch) -> Tensor:
        features = self.net.trunk(batch.x)
        loss = F.cross_entropy(self.net.head(features, batch.task), batch.y)
        for teacher in self.teacher:  # one, or none
            with torch.no_grad():
                old = teacher.trunk(batch.x)
            for task in self.earlier:
                answers = self.net.head(features, task), teacher.head(old, task)
                loss = loss + self.strength * distillation(*answers, self.temperature)
        return loss


def distillation(logits: Tensor, old: Tensor, temperature: float) -> Tensor:
    """Cross-entropy with the old answer, both softened: p^(1/T) / sum p^(1/T) is softmax(logits / T). Mean of a batch."""
    return F.cross_entropy(logits / temperature, torch.softmax(old / temperature, 1))
