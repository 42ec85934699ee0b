"""MAS: memory aware synapses (Aljundi, Babiloni, Elhoseiny, Rohrbach, Tuytelaars, ECCV 2018), https://arxiv.org/abs/1711.09601

After a task, the importance of a weight is measured as the sensitivity of the network's outputs to it, for which no labels
are needed. While later tasks are learned, a penalty keeps important weights near their values.
"""

from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from hatrack.methods.divergence import spring
from hatrack.methods.fit import Fit
from hatrack.methods.method import Method
from hatrack.methods.parts.single_gradients import SumOfSizes
from hatrack.methods.parts.springs import spring_energy
from hatrack.methods.parts.vectors import extended, values
from hatrack.networks.network import Network
from hatrack.options import Option, check
from hatrack.regime import Regime
from hatrack.seeds import generator
from hatrack.tasks.split import Batch
from hatrack.tasks.task import Task


class MAS(Method):
    """Memory aware synapses: a weight that the answers to earlier tasks are sensitive to is held by a stiff spring.

    The importance of a weight is the mean absolute gradient of the squared norm of the outputs. A quadratic penalty of that
    stiffness (a spring) pulls it towards its value after the last task. It acts on the trunk, and on the head if all tasks
    share it; the head of a single task is trained by that task only.

    Args:
        net: the network; the method trains it in place. The options are listed by `hatrack list mas`.

    Example:
        >>> method = hr.MAS(hr.Network(trunk, tasks=tasks), strength=1.0)
        >>> for task in tasks:
        ...     method.learn(task, hr.Trainer(hr.Regime(epochs=20)))

    See docs/methods/mas.md for formulas, published values and results.
    """

    importance: Tensor  # (weights,): Omega
    anchor: Tensor  # (weights,): the weights after the last task
    measured: Tensor  # 0-d: number of tasks in Omega

    def __init__(
        self,
        net: Network,
        *,
        strength: Annotated[float, Option("strength of the springs: larger forgets less and learns less", low=0)] = 1.0,
        samples: Annotated[int, Option("training images that importance is measured on; 0: all of the task", low=0)] = 0,
        group: Annotated[
            int,
            Option("images whose gradients are added up before the size is taken: 1 as in the paper", low=1),
        ] = 1,
        over_tasks: Annotated[Literal["sum", "mean"], Option("how the importances of the tasks are put together")] = "sum",
    ) -> None:
        super().__init__(net)
        self.options = check(MAS, locals())
        self.strength, self.samples, self.group, self.over_tasks = strength, samples, group, over_tasks
        now = self._vector().detach()
        self.register_buffer("importance", torch.zeros_like(now))
        self.register_buffer("anchor", now.clone())
        self.register_buffer("measured", torch.zeros((), device=now.device, dtype=torch.float32))

    def _weights(self) -> dict[str, nn.Parameter]:
        """Return the parameters that the penalty acts on, by their names in the network."""
        prefix = "" if self.net.needs_no_task else "trunk."
        return {name: p for name, p in self.net.named_parameters() if p.requires_grad and name.startswith(prefix)}

    def _vector(self) -> Tensor:
        """Return their values as one vector (weights,)."""
        return values(list(self._weights().values()))

    def on_new_tasks(self) -> None:
        """Add places for the new rows of a head that grows."""
        now = self._vector()
        self.importance = extended(self.importance, torch.zeros_like(now))
        self.anchor = extended(self.anchor, now)

    def learn_task(self, task: Task, fit: Fit) -> None:
        fit(self, task)
        new = self.measure(task)
        self.measured.add_(1)
        self.importance.add_((new - self.importance) / self.measured if self.over_tasks == "mean" else new)
        self.anchor.copy_(self._vector().detach())

    def loss(self, batch: Batch) -> Tensor:
        """Return the cross-entropy plus strength sum Omega (theta - anchor)^2 (Eq. 4)."""
        return super().loss(batch) + 2 * self.strength * spring_energy(
            self.trained_parameters(), self.anchor, self.importance
        )

    def explain_divergence(self, regime: Regime) -> str:
        stiffest = 2 * self.importance.max().item()  # the curvature at strength 1
        return spring(regime, self.strength * stiffest, strength=stiffest)

    def measure(self, task: Task) -> Tensor:
        """Measure Omega of a task (weights,): the mean over its images of |d ||F(x)||^2 / d theta|, F the logits (Eq. 3).

        Args:
            task: the task, on the method's device.

        Returns:
            One number per weight. With `group` over 1, the gradients of the images of a group are added up first.
        """
        order = torch.randperm(len(task.train), generator=generator(self.net.seed, "importance", task.index))
        order = order[: self.samples or None].to(task.train.y.device)
        weights = list(self._weights().values())
        three = task.train.inputs(order[[0, len(order) // 2, -1]])
        sums = SumOfSizes(self.eval(), task.index, weights, squared_norm, [three], size=torch.abs, group=self.group)
        totals = [torch.zeros_like(p) for p in weights]
        for _, x in task.train.read(torch.split(order, sums.rows)):
            for total, found in zip(totals, sums(x), strict=True):
                total += found
        return values(totals) / len(order)


def squared_norm(logits: Tensor) -> Tensor:
    """Return the squared norm of every row."""
    return logits.square().sum(1)
