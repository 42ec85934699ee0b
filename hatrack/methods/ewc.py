"""EWC: elastic weight consolidation (Kirkpatrick et al., PNAS 2017), https://arxiv.org/abs/1612.00796

After a task, the Fisher information tells how important each weight is to it. While later tasks are learned, a quadratic
penalty of that strength (a spring) pulls the weight back to the value it had, its anchor. Several springs on a weight equal
one spring: their stiffnesses add up, and its anchor is the weighted mean of theirs. So one anchor and one stiffness per
weight suffice, and a step takes as long in the 200th task as in the second. Paper 002 has the same idea, but its formula
lacks a factor 2 and pulls weights towards half the mean. A departure from the paper, by an option: no spring is stiffer
than `limit`, because SGD diverges on a stiffness over 2 / lr.
"""

from typing import Annotated, Literal

import torch
from torch import Tensor

from hatrack.methods.divergence import spring
from hatrack.methods.fit import Fit
from hatrack.methods.method import Method
from hatrack.methods.parts.fisher import Estimator, fisher_diagonal
from hatrack.methods.parts.springs import spring_energy
from hatrack.methods.parts.vectors import extended, values
from hatrack.networks.network import Network
from hatrack.options import Option, check
from hatrack.regime import Regime
from hatrack.tasks.split import Batch
from hatrack.tasks.task import Task


class EWC(Method):
    """Elastic weight consolidation: the more an earlier task cares about a weight, the stiffer the spring that holds it.

    The importance of a weight is the diagonal of the Fisher information, measured after each task. The penalty acts on the
    trunk, and on the head if all tasks share it; the head of a single task is trained by that task only.

    Args:
        net: the network; the method trains it in place. The options are listed by `hatrack list ewc`.

    Example:
        >>> method = hr.EWC(hr.Network(trunk, tasks=tasks), strength=200)
        >>> for task in tasks:
        ...     method.learn(task, hr.Trainer(hr.Regime(epochs=20)))

    See docs/methods/ewc.md for formulas, published values and results.
    """

    targets = "classes"

    fisher: Tensor  # each (weights,)
    anchor: Tensor
    learned: Tensor

    def __init__(
        self,
        net: Network,
        *,
        strength: Annotated[float, Option("lambda, of the springs: larger forgets less and learns less", low=0)] = 200.0,
        limit: Annotated[
            float,
            Option("the largest STRENGTH times Fisher of a spring; those over 2 / lr explode; 0: no limit", low=0),
        ] = 10.0,
        anchors: Annotated[
            Literal["all", "last", "mean", "online"],
            Option(
                "springs to the weights after every task; or to those after the last one, by its own Fisher, by the mean "
                "over the tasks (the HAT authors), or by a sum that fades by DECAY"
            ),
        ] = "all",
        decay: Annotated[float, Option("anchors 'online': what a task leaves of the Fisher before it", low=0, high=1)] = 0.9,
        importance: Annotated[
            Literal["fisher", "ones"], Option("stiffness by the Fisher information, or the same for all weights: plain L2")
        ] = "fisher",
        estimator: Annotated[
            Estimator,
            Option(
                "the Fisher from single images with true labels, or with every label as often as it is expected, or as "
                "the HAT authors from batches of 20 with dropout (about 1/20 of the first)"
            ),
        ] = "samples",
        samples: Annotated[int, Option("training images that the Fisher is measured on; 0: all of the task", low=0)] = 0,
        rescale: Annotated[bool, Option("scale every new Fisher to the range from 0 to 1")] = False,
    ) -> None:
        super().__init__(net)
        self.options = check(EWC, locals())
        self.strength, self.limit, self.anchors, self.decay = strength, limit, anchors, decay
        self.importance = importance
        self.estimator, self.samples, self.rescale = estimator, samples, rescale
        now = values(self.net.shared_parameters()).detach()
        self.register_buffer("fisher", torch.zeros_like(now))  # 0: no penalty in the first task
        self.register_buffer("anchor", now.clone())
        self.register_buffer("learned", now.new_zeros(()))  # number of tasks learned

    def on_new_tasks(self) -> None:
        """Add places for the new rows of a head that grows."""
        now = values(self.net.shared_parameters())
        self.fisher = extended(self.fisher, torch.zeros_like(now))
        self.anchor = extended(self.anchor, now)

    def learn_task(self, task: Task, fit: Fit) -> None:
        fit(self, task)
        self.consolidate(self._importance(task))

    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) + self.penalty()

    def penalty(self) -> Tensor:
        """Return (lambda / 2) sum F (theta - anchor)^2. (For anchors="all", the sum over tasks is larger by a constant.)"""
        if not self.limit:
            return self.strength * spring_energy(self.trained_parameters(), self.anchor, self.fisher)
        return spring_energy(self.trained_parameters(), self.anchor, self.stiffness())

    def stiffness(self) -> Tensor:
        """Return the stiffness of the springs (weights,), lambda F, at most `limit`."""
        springs = self.strength * self.fisher
        return springs.clamp_(max=self.limit) if self.limit else springs

    def explain_divergence(self, regime: Regime) -> str:
        return spring(regime, self.stiffness().max().item(), strength=self.fisher.max().item(), limit=1.0)

    def _importance(self, task: Task) -> Tensor:
        """Measure how important each weight is to a task (weights,)."""
        if self.importance == "ones":
            return torch.ones_like(self.fisher)
        new = fisher_diagonal(
            self, task.train, task.index, self.net.shared_parameters(), samples=self.samples, estimator=self.estimator
        )
        if not self.rescale or not new.numel():
            return new
        low, high = new.aminmax()
        return (new - low) / (high - low) if high > low else new

    @torch.no_grad()
    def consolidate(self, new: Tensor) -> None:
        """Update the springs after a task.

        Args:
            new: the Fisher diagonal of the task (weights,).
        """
        now = values(self.net.shared_parameters())
        match self.anchors:
            case "all":  # sum_k F_k (theta - theta_k)^2 = S (theta - M)^2 + constant, S = sum F_k, M = sum F_k theta_k / S
                total = self.fisher + new
                now = torch.lerp(self.anchor, now, torch.where(total > 0, new / total, 1.0))
                self.fisher.copy_(total)
            case "last":
                self.fisher.copy_(new)
            case "mean":
                self.fisher.mul_(self.learned).add_(new).div_(self.learned + 1)
            case "online":
                self.fisher.mul_(self.decay).add_(new)
        self.anchor.copy_(now)
        self.learned.add_(1)
