"""IMM-mode: incremental moment matching by the mode (Lee, Kim, Jun, Ha, Zhang, NeurIPS 2017), https://arxiv.org/abs/1703.08475

As IMM-mean, but every weight is averaged by how much each task cares about it, its Fisher information: the result is the
mode of the product of the tasks' Gaussian posteriors. In the HAT authors' code, whose numbers 001 reports, the result is
never written into the network; `merge="none"` is what they ran.
"""

from typing import Annotated, Literal

import torch
from torch import Tensor

from hatrack.methods.divergence import spring
from hatrack.methods.fit import Fit
from hatrack.methods.method import Method
from hatrack.methods.parts.fisher import Estimator, fisher_diagonal
from hatrack.methods.parts.vectors import set_values, values
from hatrack.networks.network import Network
from hatrack.options import Option, check
from hatrack.regime import Regime
from hatrack.tasks.split import Batch
from hatrack.tasks.task import Task


class IMMMode(Method):
    """Incremental moment matching by the mode: after each task the weights become the tasks' mean by Fisher information."""

    fisher: Tensor  # each (weights,)
    anchor: Tensor
    learned: Tensor

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
        self.register_buffer("fisher", torch.zeros_like(now))  # summed over the tasks
        self.register_buffer("anchor", now.clone())  # the merged weights of the tasks so far
        self.register_buffer("learned", now.new_zeros(()))  # how many tasks

    def learn_task(self, task: Task, fit: Fit) -> None:
        fit(self, task)
        if self.merging == "mode":
            self.merge(self._measure(task))
        self.anchor.copy_(values(self.net.shared_parameters()).detach())
        self.learned.add_(1)

    def _measure(self, task: Task) -> Tensor:
        """How much the task cares about each weight, as it has just been trained."""
        weights = self.net.shared_parameters()
        return fisher_diagonal(self, task.train, task.index, weights, samples=self.samples, estimator=self.estimator)

    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) + self.penalty()

    def penalty(self) -> Tensor:
        """L2-transfer: (strength / 2) sum (theta - anchor)^2, from the second task on."""
        pull = self.strength / 2 * self.learned.clamp(max=1)
        return pull * (values(self.net.shared_parameters()) - self.anchor).square().sum()

    def explain_divergence(self, regime: Regime) -> str:
        return spring(regime, self.strength * self.learned.clamp(max=1).item(), strength=1.0)

    @torch.no_grad()
    def merge(self, new: Tensor) -> None:
        """theta <- (F_new theta + F anchor) / (F_new + F), F <- F_new + F; a weight that no task cares about stays."""
        total = self.fisher + new
        share = torch.where(total > 0, new / total, 1.0)
        set_values(self.net.shared_parameters(), torch.lerp(self.anchor, values(self.net.shared_parameters()), share))
        self.fisher.copy_(total)
