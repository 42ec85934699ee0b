"""SI: synaptic intelligence (Zenke, Poole, Ganguli, ICML 2017), https://arxiv.org/abs/1703.04200

During training, the path integral of the gradient measures how much the movement of each weight lowered the loss. From it
follows the importance of the weight, the stiffness of the penalty that holds it while later tasks are learned. The gradient
of the penalty is added to the gradients rather than the penalty to the loss: the path integral needs the gradient of the
plain loss, and this way one backward pass suffices. So the loss that training reports is the plain one.
"""

from typing import Annotated, Any

import torch
from torch import Tensor

from hatrack.methods.divergence import spring
from hatrack.methods.fit import Fit
from hatrack.methods.method import Method
from hatrack.methods.parts.vectors import add_to_grads, extended, grads, values
from hatrack.networks.network import Network
from hatrack.options import Option, check
from hatrack.regime import Regime
from hatrack.tasks.split import Batch
from hatrack.tasks.task import Task


class SI(Method):
    """Synaptic intelligence: a weight that earned much of the fall of earlier losses is held by a stiff spring.

    The contribution of a weight is summed up during training, without a further pass over the data. The penalty acts on the
    trunk, and on the head if all tasks share it; the head of a single task is trained by that task only.

    Args:
        net: the network; the method trains it in place. The options are listed by `hatrack list si`.

    Example:
        >>> method = hr.SI(hr.Network(trunk, tasks=tasks), c=0.1)
        >>> for task in tasks:
        ...     method.learn(task, hr.Trainer(hr.Regime(epochs=20)))

    See docs/methods/si.md for formulas, published values and results.
    """

    # Each (weights,)
    importance: Tensor  # Omega
    anchor: Tensor  # the weights after the last task
    path: Tensor  # omega: the contribution of each weight in this task
    gradient: Tensor  # of the plain loss, in this step
    before: Tensor  # the weights before this step

    def __init__(
        self,
        net: Network,
        *,
        c: Annotated[float, Option("strength of the springs: larger forgets less and learns less", low=0, high=1e30)] = 0.1,
        xi: Annotated[float, Option("damping: keeps weights that hardly moved from having huge importances", above=0)] = 0.1,
    ) -> None:
        super().__init__(net)
        self.options = check(SI, locals())
        self.c, self.xi = c, xi
        now = values(self.net.shared_parameters()).detach()
        self.register_buffer("importance", torch.zeros_like(now))
        self.register_buffer("anchor", now.clone())
        self.register_buffer("path", torch.zeros_like(now))
        for name in ("gradient", "before"):
            self.register_buffer(name, torch.zeros_like(now), persistent=False)

    def on_new_tasks(self) -> None:
        """Add places for the new rows of a head that grows."""
        now = values(self.net.shared_parameters())
        self.importance = extended(self.importance, torch.zeros_like(now))
        self.anchor = extended(self.anchor, now)
        self.path = extended(self.path, torch.zeros_like(now))
        self.gradient = extended(self.gradient, torch.zeros_like(now))
        self.before = extended(self.before, torch.zeros_like(now))

    def learn_task(self, task: Task, fit: Fit) -> None:
        start = values(self.net.shared_parameters()).detach()
        fit(self, task)
        self.consolidate(start)

    @torch.no_grad()
    def consolidate(self, start: Tensor) -> None:
        """Add the contributions of a task to the importances (Eq. 5).

        Args:
            start: the weights with which the task began.
        """
        now = values(self.net.shared_parameters())
        self.importance.add_(self.path / ((now - start).square() + self.xi)).relu_()
        self.anchor.copy_(now)
        self.path.zero_()

    def edit_grads(self, batch: Batch, aux: Any) -> None:
        """Store the gradient of the plain loss, then add that of the penalty c sum Omega (theta - anchor)^2 (Eq. 4)."""
        weights = self.net.shared_parameters()
        grads(weights, out=self.gradient)
        values(weights, out=self.before)
        add_to_grads(weights, (self.before - self.anchor).mul_(self.importance), 2 * self.c)

    def explain_divergence(self, regime: Regime) -> str:
        stiffest = 2 * self.importance.max().item()  # the curvature at c = 1
        return spring(regime, self.c * stiffest, c=stiffest)

    def constrain(self) -> None:
        """Subtract from omega the gradient times the actual update, whatever the optimizer is."""
        self.path.addcmul_(self.gradient, values(self.net.shared_parameters()).sub_(self.before), value=-1)
