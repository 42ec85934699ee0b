"""IMM-mean: incremental moment matching by the mean (Lee, Kim, Jun, Ha, Zhang, NeurIPS 2017), https://arxiv.org/abs/1703.08475

A new task is trained with an L2 penalty towards the weights of the earlier ones (L2-transfer), so that all weights between
both are good for all tasks. Then the network gets a weighted mean of both. Only what tasks share is averaged: the head of a
single task stays as it was trained, and running statistics of norms stay those of the last task.
"""

from typing import Annotated

import torch
from torch import Tensor

from hatrack.methods.divergence import spring
from hatrack.methods.fit import Fit
from hatrack.methods.method import Method
from hatrack.methods.parts.springs import spring_energy
from hatrack.methods.parts.vectors import extended, set_values, values
from hatrack.networks.network import Network
from hatrack.options import Option, check
from hatrack.regime import Regime
from hatrack.tasks.split import Batch
from hatrack.tasks.task import Task


class IMMMean(Method):
    """Incremental moment matching by the mean: after each task the weights become the mean over the tasks so far.

    While a task is learned, an L2 penalty pulls the weights towards the merged weights of the earlier tasks; without it, the
    mean of two solutions would be good for neither task.

    Args:
        net: the network; the method trains it in place. The options are listed by `hatrack list imm-mean`.

    Example:
        >>> method = hr.IMMMean(hr.Network(trunk, tasks=tasks), strength=1e-4)
        >>> for task in tasks:
        ...     method.learn(task, hr.Trainer(hr.Regime(epochs=20)))

    See docs/methods/imm-mean.md for formulas, published values and results.
    """

    anchor: Tensor  # (weights,): the merged weights of the tasks so far
    learned: Tensor  # 0-d: number of tasks learned

    def __init__(
        self,
        net: Network,
        *,
        strength: Annotated[float, Option("pull towards the merged weights of the earlier tasks", low=0)] = 1e-4,
        alpha: Annotated[
            float, Option("share of the new task in the merge; 0: 1 / the number of tasks", low=0, high=1)
        ] = 0.0,
    ) -> None:
        super().__init__(net)
        self.options = check(IMMMean, locals())
        self.strength, self.alpha = strength, alpha
        now = values(self.net.shared_parameters()).detach()
        self.register_buffer("anchor", now.clone())
        self.register_buffer("learned", now.new_zeros(()))

    def on_new_tasks(self) -> None:
        """Add places for the new rows of a head that grows."""
        now = values(self.net.shared_parameters())
        self.anchor = extended(self.anchor, now)

    def learn_task(self, task: Task, fit: Fit) -> None:
        fit(self, task)
        self.merge()

    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) + self.penalty()

    def penalty(self) -> Tensor:
        """Return L2-transfer: (strength / 2) sum (theta - anchor)^2, from the second task on."""
        strength = self.strength * self.learned.clamp(max=1)
        return strength * spring_energy(self.trained_parameters(), self.anchor)

    def explain_divergence(self, regime: Regime) -> str:
        return spring(regime, self.strength * self.learned.clamp(max=1).item(), strength=1.0)

    @torch.no_grad()
    def merge(self) -> None:
        """Set theta <- (theta + t anchor) / (t + 1) after t earlier tasks, or alpha theta + (1 - alpha) anchor."""
        share = 1 / (self.learned + 1)
        if self.alpha:
            share = torch.where(self.learned > 0, self.alpha, share)
        share = self._with_new_rows(share)
        set_values(self.net.shared_parameters(), torch.lerp(self.anchor, values(self.net.shared_parameters()), share))
        self.anchor.copy_(values(self.net.shared_parameters()))
        self.learned.add_(1)

    def _with_new_rows(self, share: Tensor) -> Tensor:
        """Return the share of the new task for every weight. In a head of all classes it is 1 for rows that no earlier task
        has trained: the mean over the tasks that trained a row leaves out its initial weights."""
        if not self.net.incremental:
            return share
        new = {id(p) for task, head in enumerate(self.net.heads) if task not in self.history for p in head.parameters()}
        shares = [torch.ones_like(p) if id(p) in new else share.expand_as(p) for p in self.net.shared_parameters()]
        return values(shares)
