"""Anchored SGD: every weight of the trunk is pulled back to where the last task left it (L2, all weights equally)."""

from typing import Annotated

import torch
from torch import Tensor

from hatrack import Batch, Fit, Method, Network, Option, Task, check


class Anchored(Method):
    """SGD with an elastic band from every weight to its value at the end of the last task."""

    anchor: Tensor
    pull: Tensor

    def __init__(
        self,
        net: Network,
        *,
        strength: Annotated[float, Option("stiffness of the bands", low=0)] = 0.1,
    ) -> None:
        super().__init__(net)
        self.options = check(Anchored, locals())
        self.strength = strength
        self.register_buffer("anchor", self.weights().detach().clone())
        self.register_buffer("pull", torch.zeros(()))  # no band before the first task is learned

    def weights(self) -> Tensor:
        """All weights of the trunk as one vector."""
        return torch.cat([p.flatten() for p in self.net.trunk.parameters()])

    def learn_task(self, task: Task, fit: Fit) -> None:
        fit(self, task)
        self.anchor.copy_(self.weights().detach())
        self.pull.fill_(self.strength)

    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) + self.pull / 2 * (self.weights() - self.anchor).square().sum()
