"""MAS: memory aware synapses (Aljundi, Babiloni, Elhoseiny, Rohrbach, Tuytelaars, ECCV 2018), https://arxiv.org/abs/1711.09601

After a task, every weight is asked how far the network's answers would move if it did; that is its importance, and no
label is needed for it. Later tasks pay for moving important weights.
"""

from collections.abc import Callable, Iterator
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from hatrack.methods.divergence import spring
from hatrack.methods.fit import Fit
from hatrack.methods.method import Method
from hatrack.methods.parts.vectors import values
from hatrack.networks.network import Network
from hatrack.options import Option, check
from hatrack.regime import Regime
from hatrack.seeds import generator
from hatrack.tasks.split import Batch, Split
from hatrack.tasks.task import Task

NUMBERS = 2**26  # how many numbers the gradients that are computed at a time may have, in all
EXAMPLES = 64  # and how many examples they may be of

Named = dict[str, Tensor]


class MAS(Method):
    """Memory aware synapses: a weight that the answers to earlier tasks are sensitive to is held by a stiff spring.

    The weights of the trunk are held, and the head if all tasks share it; heads of single tasks are left to their tasks.
    """

    importance: Tensor  # (weights,)
    anchor: Tensor  # (weights,)
    measured: Tensor

    def __init__(
        self,
        net: Network,
        *,
        strength: Annotated[float, Option("strength of the springs: larger forgets less and learns less", low=0)] = 1.0,
        samples: Annotated[int, Option("training images that importance is measured on; 0: all of the task", low=0)] = 0,
        group: Annotated[
            int,
            Option("images whose gradients are added up before the size is taken: 1 as in the paper, more is faster", low=1),
        ] = 1,
        over_tasks: Annotated[Literal["sum", "mean"], Option("how the importances of the tasks are put together")] = "sum",
    ) -> None:
        super().__init__(net)
        self.options = check(MAS, locals())
        self.strength, self.samples, self.group, self.over_tasks = strength, samples, group, over_tasks
        now = self._vector().detach()
        self.register_buffer("importance", torch.zeros_like(now))  # Omega
        self.register_buffer("anchor", now.clone())  # the weights after the last task
        self.register_buffer("measured", torch.zeros((), device=now.device))  # how many importances are in Omega

    def _weights(self) -> dict[str, nn.Parameter]:
        """What is held, by its name in the network."""
        held = "" if self.net.shared else "trunk."
        return {name: p for name, p in self.net.named_parameters() if p.requires_grad and name.startswith(held)}

    def _vector(self) -> Tensor:
        return values(list(self._weights().values()))

    def learn_task(self, task: Task, fit: Fit) -> None:
        fit(self, task)
        new = self.measure(task)
        self.measured.add_(1)
        self.importance.add_((new - self.importance) / self.measured if self.over_tasks == "mean" else new)
        self.anchor.copy_(self._vector().detach())

    def loss(self, batch: Batch) -> Tensor:
        """With the penalty strength sum Omega (theta - anchor)^2 (Eq. 4)."""
        return super().loss(batch) + self.strength * (self.importance * (self._vector() - self.anchor).square()).sum()

    def explain_divergence(self, regime: Regime) -> str:
        stiffest = 2 * self.importance.max().item()  # the curvature at strength 1
        return spring(regime, self.strength * stiffest, strength=stiffest)

    @torch.no_grad()
    def measure(self, task: Task) -> Tensor:
        """Omega of one task: the mean over its images of |d ||F(x)||^2 / d theta|, F the logits (Eq. 3); (weights,)."""
        self.eval()
        weights: Named = {name: p.detach() for name, p in self._weights().items()}
        total: Named = {name: torch.zeros_like(p) for name, p in weights.items()}

        def size(weights: Named, x: Tensor) -> Tensor:
            answers: Tensor = functional_call(self.net, weights, (x, task.index))
            return answers.square().sum()

        order = torch.randperm(len(task.train), generator=generator(self.net.seed, "importance", task.index))
        order = order[: self.samples or None].to(task.train.y.device)
        for groups in self._groups(task.train, order):
            for name, gradients in gradient_of_each(size, weights, groups).items():
                total[name] += gradients.abs().sum(0)
        return values(list(total.values())) / len(order)

    def _groups(self, split: Split, order: Tensor) -> Iterator[Tensor]:
        """The images in groups whose gradients are added up, as many groups at a time as fit: (groups, group, *shape)."""
        fit = max(1, min(NUMBERS // max(1, len(self.importance)), EXAMPLES // self.group))
        for index in torch.split(order, fit * self.group):
            x = split.inputs(index)
            whole = len(x) // self.group
            rest = whole * self.group
            if whole:
                yield x[:rest].reshape(whole, self.group, *x.shape[1:])
            if rest < len(x):
                yield x[None, rest:]


def gradient_of_each(size: Callable[[Named, Tensor], Tensor], weights: Named, groups: Tensor) -> Named:
    """The gradient of `size` for every group, each (groups, *shape of the weight): for all at once, or, in a network with
    an operation that can't do that, for one after the other."""
    try:
        every: Named = vmap(grad(size), in_dims=(None, 0))(weights, groups)
        return every
    except RuntimeError:
        leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
        with torch.enable_grad():
            found = [torch.autograd.grad(size(leaves, x), list(leaves.values()), materialize_grads=True) for x in groups]
        return {name: torch.stack(each) for name, each in zip(weights, zip(*found, strict=True), strict=True)}
