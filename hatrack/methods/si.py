"""SI: synaptic intelligence (Zenke, Poole, Ganguli, ICML 2017), https://arxiv.org/abs/1703.04200

Every weight keeps account of how much of the fall of the loss its own movement brought about (the path integral of the
gradient); what a weight has earned so far is the stiffness that holds it while later tasks are learned. The penalty is
added to the gradients rather than to the loss: the account needs the gradient of the plain loss, and an optimizer can be
given both with one backward pass. So the loss that training reports is the plain one.
"""

from typing import Annotated, Any

import torch
from torch import Tensor

from hatrack.methods.divergence import spring
from hatrack.methods.fit import Fit
from hatrack.methods.method import Method
from hatrack.methods.parts.vectors import add_to_grads, grads, values
from hatrack.networks.network import Network
from hatrack.options import Option, check
from hatrack.regime import Regime
from hatrack.tasks.split import Batch
from hatrack.tasks.task import Task


class SI(Method):
    """Synaptic intelligence: a weight that earned much of the fall of earlier losses is held by a stiff spring.

    The weights of the trunk are held, and the head if all tasks share it; heads of single tasks are left to their tasks.
    """

    importance: Tensor  # each (weights,)
    anchor: Tensor
    path: Tensor
    gradient: Tensor
    before: Tensor

    def __init__(
        self,
        net: Network,
        *,
        c: Annotated[float, Option("strength of the springs: larger forgets less and learns less", low=0)] = 0.1,
        xi: Annotated[float, Option("damping: keeps weights that hardly moved from having huge importances", above=0)] = 0.1,
    ) -> None:
        super().__init__(net)
        self.options = check(SI, locals())
        self.c, self.xi = c, xi
        now = values(self.net.shared_parameters()).detach()
        self.register_buffer("importance", torch.zeros_like(now))  # Omega
        self.register_buffer("anchor", now.clone())  # the weights after the last task
        self.register_buffer("path", torch.zeros_like(now))  # omega: what each weight has earned in this task
        for name in ("gradient", "before"):  # of the plain loss, and the weights, at the beginning of a step
            self.register_buffer(name, torch.zeros_like(now), persistent=False)

    def learn_task(self, task: Task, fit: Fit) -> None:
        start = values(self.net.shared_parameters()).detach()
        fit(self, task)
        self.consolidate(start)

    @torch.no_grad()
    def consolidate(self, start: Tensor) -> None:
        """After a task that began with the weights `start`: what each weight earned becomes importance (Eq. 5)."""
        now = values(self.net.shared_parameters())
        self.importance.add_(self.path / ((now - start).square() + self.xi)).relu_()
        self.anchor.copy_(now)
        self.path.zero_()

    def edit_grads(self, batch: Batch, aux: Any) -> None:
        """Take down the gradient of the plain loss; then add that of the penalty c sum Omega (theta - anchor)^2 (Eq. 4)."""
        weights = self.net.shared_parameters()
        grads(weights, out=self.gradient)
        values(weights, out=self.before)
        add_to_grads(weights, (self.before - self.anchor).mul_(self.importance), 2 * self.c)

    def explain_divergence(self, regime: Regime) -> str:
        stiffest = 2 * self.importance.max().item()  # the curvature at c = 1
        return spring(regime, self.c * stiffest, c=stiffest)

    def constrain(self) -> None:
        """The account: minus the gradient times what the optimizer really did, whichever it is."""
        self.path.addcmul_(self.gradient, values(self.net.shared_parameters()).sub_(self.before), value=-1)
