"""LwF: learning without forgetting (Li, Hoiem, ECCV 2016), https://arxiv.org/abs/1606.09282

While a task is learned, the heads of the earlier tasks are trained to give the same outputs on the new images as the network
before the task did. That old network is not kept between tasks: it is the network at the beginning of `learn_task`.
"""

import copy
from typing import Annotated, Literal

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
    """Learning without forgetting: on the images of a new task, the earlier tasks' heads go on answering as before.

    For every earlier task the loss has a distillation term: the cross-entropy between the outputs of its head and those of
    the old network, on the images of the new task. No data of earlier tasks is needed.

    Args:
        net: the network; the method trains it in place. The options are listed by `hatrack list lwf`.

    Example:
        >>> method = hr.LwF(hr.Network(trunk, tasks=tasks), strength=2)
        >>> for task in tasks:
        ...     method.learn(task, hr.Trainer(hr.Regime(epochs=20)))

    See docs/methods/lwf.md for formulas, published values and results.
    """

    targets = "classes"

    step_forms = "many"

    learned: Tensor  # (tasks,): whether a task has been learned

    def __init__(
        self,
        net: Network,
        *,
        strength: Annotated[float, Option("weight of the old answers: larger forgets less and learns less", low=0)] = 2.0,
        temperature: Annotated[float, Option("above 1 the less likely classes of an answer count for more", above=0)] = 1.0,
        term: Annotated[
            Literal["once", "per-task"],
            Option("a shared head: its old answers count once, or once for every earlier task", added=True),
        ] = "once",
    ) -> None:
        super().__init__(net)
        self.options = check(LwF, locals())
        self.strength, self.temperature, self.term = strength, temperature, term
        self.register_buffer("learned", torch.zeros(0, dtype=torch.bool, device=net.example.device))
        self.earlier: list[int] = []  # the tasks with a distillation term; it and the next are set by `learn_task`
        self.weight = strength  # of every distillation term; set by `learn_task`
        self.teacher: list[Network] = []  # the old network; in a list, so that it is no submodule and no part of checkpoints
        self.on_new_tasks()

    def on_new_tasks(self) -> None:
        new = len(self.net.classes) - len(self.learned)
        if new:
            self.learned = torch.cat([self.learned, self.learned.new_zeros(new)])

    def learn_task(self, task: Task, fit: Fit) -> None:
        earlier = [k for k, learned in enumerate(self.learned.tolist()) if learned and k != task.index]
        # A shared head has one output for all of them, a head of all classes that of the last task.
        self.earlier = earlier[:1] if self.net.shared else earlier[-1:] if self.net.incremental else earlier
        self.weight = self.strength * (len(earlier) if self.net.shared and self.term == "per-task" else 1)
        self.teacher = [copy.deepcopy(self.net).eval().requires_grad_(False)] if earlier else []
        fit(self, task)
        self.learned[task.index] = True

    def end_learning(self) -> None:
        self.earlier, self.teacher = [], []

    def loss(self, batch: Batch) -> Tensor:
        """Return the cross-entropy of the new task plus strength times the distillation term of every earlier task."""
        features = self.net.trunk(batch.x)
        new = self.net.head(features, self.reach(batch.task))
        loss = batch.loss(new)
        for teacher in self.teacher:  # one, or none in the first task
            with torch.no_grad():
                old_features = teacher.trunk(batch.x)
            for task in self.earlier:
                logits = new if self.net.incremental else self.net.head(features, task)
                loss = loss + self.weight * distillation(logits, teacher.head(old_features, task), self.temperature)
        return loss


def distillation(logits: Tensor, old: Tensor, temperature: float) -> Tensor:
    """Return the mean cross-entropy with the old output, both at temperature T.

    softmax(logits / T) is p^(1/T) / sum p^(1/T), as the paper writes it. Classes that the old output lacks have
    probability 0 in it: a head of all classes has grown since then.
    """
    target = F.pad(torch.softmax(old / temperature, 1), (0, logits.shape[1] - old.shape[1]))
    return F.cross_entropy(logits / temperature, target)
