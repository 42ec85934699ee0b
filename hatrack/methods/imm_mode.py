"""IMM-mode: incremental moment matching by the mode (Lee, Kim, Jun, Ha, Zhang, NeurIPS 2017), https://arxiv.org/abs/1703.08475

Like IMM-mean, but in the mean of a weight each task counts by its Fisher information: the result is the mode of the product
of the tasks' Gaussian posteriors. In the HAT authors' code, whose numbers paper 001 reports, the result is never written
into the network; `merge="none"` is what they ran.
"""

from typing import Annotated, Literal

import torch
from torch import Tensor

from hatrack.methods.divergence import spring
from hatrack.methods.fit import Fit
from hatrack.methods.method import Method
from hatrack.methods.parts.fisher import Estimator, fisher_diagonal
from hatrack.methods.parts.springs import spring_energy
from hatrack.methods.parts.vectors import extended, set_values, values
from hatrack.networks.network import Network
from hatrack.options import Option, check
from hatrack.regime import Regime
from hatrack.tasks.split import Batch
from hatrack.tasks.task import Task


class IMMMode(Method):
    """Incremental moment matching by the mode: after each task the weights become the tasks' mean by Fisher information.

    While a task is learned, an L2 penalty pulls the weights towards the merged weights of the earlier tasks. Afterwards the
    Fisher information of the task is measured, and every weight becomes the mean over the tasks, weighted by it.

    Args:
        net: the network; the method trains it in place. The options are listed by `hatrack list imm-mode`.

    Example:
        >>> method = hr.IMMMode(hr.Network(trunk, tasks=tasks), strength=0.01)
        >>> for task in tasks:
        ...     method.learn(task, hr.Trainer(hr.Regime(epochs=20)))

    See docs/methods/imm-mode.md for formulas, published values and results.
    """

    targets = "classes"

    fisher: Tensor  # (weights,): summed over the tasks
    anchor: Tensor  # (weights,): the merged weights of the tasks so far
    learned: Tensor  # 0-d: number of tasks learned

    def __init__(
        self,
        net: Network,
        *,
        strength: Annotated[float, Option("pull towards the merged weights of the earlier tasks", low=0)] = 0.01,
        merge: Annotated[
            Literal["mode", "none"], Option("average by the Fisher information, or not at all as in the HAT authors' code")
        ] = "mode",
        estimator: Annotated[
            Estimator, Option("the Fisher from single images, or with expected labels, or from batches: as in ewc")
        ] = "samples",
        samples: Annotated[int, Option("training images that the Fisher is measured on; 0: all of the task", low=0)] = 0,
    ) -> None:
        super().__init__(net)
        self.options = check(IMMMode, locals())
        self.strength, self.merging, self.estimator, self.samples = strength, merge, estimator, samples
        now = values(self.net.shared_parameters()).detach()
        self.register_buffer("fisher", torch.zeros_like(now))
        self.register_buffer("anchor", now.clone())
        self.register_buffer("learned", now.new_zeros(()))

    def on_new_tasks(self) -> None:
        """Add places for the new rows of a head that grows."""
        now = values(self.net.shared_parameters())
        self.fisher = extended(self.fisher, torch.zeros_like(now))
        self.anchor = extended(self.anchor, now)

    def learn_task(self, task: Task, fit: Fit) -> None:
        fit(self, task)
        if self.merging == "mode":
            self.merge(self._fisher_of(task))
        self.anchor.copy_(values(self.net.shared_parameters()).detach())
        self.learned.add_(1)

    def _fisher_of(self, task: Task) -> Tensor:
        """Measure the Fisher information of a task (weights,)."""
        weights = self.net.shared_parameters()
        return fisher_diagonal(self, task.train, task.index, weights, samples=self.samples, estimator=self.estimator)

    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) + self.penalty()

    def penalty(self) -> Tensor:
        """Return L2-transfer: (strength / 2) sum (theta - anchor)^2, from the second task on."""
        strength = self.strength * self.learned.clamp(max=1)
        return strength * spring_energy(self.trained_parameters(), self.anchor)

    def explain_divergence(self, regime: Regime) -> str:
        return spring(regime, self.strength * self.learned.clamp(max=1).item(), strength=1.0)

    @torch.no_grad()
    def merge(self, new: Tensor) -> None:
        """Set theta <- (F_new theta + F anchor) / (F_new + F) and F <- F_new + F. Where both are 0, theta stays.

        Args:
            new: F_new, the Fisher diagonal of the task (weights,).
        """
        total = self.fisher + new
        share = torch.where(total > 0, new / total, 1.0)
        set_values(self.net.shared_parameters(), torch.lerp(self.anchor, values(self.net.shared_parameters()), share))
        self.fisher.copy_(total)
