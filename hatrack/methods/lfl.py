"""LFL: less-forgetting learning (Jung, Ju, Jung, Kim, 2016), https://arxiv.org/abs/1607.00122

While a task is learned, the features that the heads read are pulled towards those that the network computed for the same
images before the task. That old network is not kept between tasks: it is the network at the beginning of `learn_task`.
"""

import copy
from typing import Annotated, Self

import torch
from torch import Tensor, nn

from hatrack.methods.fit import Fit
from hatrack.methods.method import Method
from hatrack.networks.network import Network
from hatrack.options import Option, check
from hatrack.tasks.split import Batch
from hatrack.tasks.task import Task


class LFL(Method):
    """Less-forgetting learning: on the images of a new task, the trunk's features stay near what they were before it.

    The loss has a term for the squared distance of the features from those of the old trunk. A dropout layer at the end of
    the trunk is switched off, as in the HAT authors' network: its noise would count as distance and pull all features
    towards zero.

    Args:
        net: the network; the method trains it in place. The options are listed by `hatrack list lfl`.

    Example:
        >>> method = hr.LFL(hr.Network(trunk, tasks=tasks), strength=0.0005)
        >>> for task in tasks:
        ...     method.learn(task, hr.Trainer(hr.Regime(epochs=20)))

    See docs/methods/lfl.md for formulas, published values and results.
    """

    scenarios = ("task", "domain")

    step_forms = "two"

    learned: Tensor  # (tasks,): whether a task has been learned

    def __init__(
        self,
        net: Network,
        *,
        strength: Annotated[
            float, Option("weight of the old features: larger forgets less and learns less", low=0)
        ] = 0.0005,
        freeze_head: Annotated[
            bool, Option("a head that all tasks share learns the first task only, as in the paper")
        ] = True,
    ) -> None:
        super().__init__(net)
        self.options = check(LFL, locals())
        self.strength, self.freeze_head = strength, freeze_head
        self.switched_off = last_dropouts(net)
        self.register_buffer("learned", torch.zeros(0, dtype=torch.bool, device=net.example.device))
        self.teacher: list[nn.Module] = []  # the old trunk; in a list, so that it is no submodule and no part of checkpoints
        self.on_new_tasks()

    def on_new_tasks(self) -> None:
        new = len(self.net.classes) - len(self.learned)
        if new:
            self.learned = torch.cat([self.learned, self.learned.new_zeros(new)])

    def train(self, mode: bool = True) -> Self:
        """Set the mode; dropout layers at the end of the trunk stay in evaluation mode."""
        super().train(mode)
        for name in self.switched_off:
            self.net.trunk.get_submodule(name).eval()
        return self

    def learn_task(self, task: Task, fit: Fit) -> None:
        earlier = any(learned for k, learned in enumerate(self.learned.tolist()) if k != task.index)
        self.teacher = [copy.deepcopy(self.net.trunk).eval().requires_grad_(False)] if earlier else []
        frozen = self.net.heads if earlier and self.net.shared and self.freeze_head else nn.ModuleList()
        try:
            frozen.requires_grad_(False)
            fit(self, task)
        finally:
            frozen.requires_grad_(True)
        self.learned[task.index] = True

    def end_learning(self) -> None:
        self.teacher = []

    def loss(self, batch: Batch) -> Tensor:
        """Return the cross-entropy plus (strength / 2) |f_old - f|^2, summed over the batch and the features."""
        features = self.net.trunk(batch.x)
        loss = batch.loss(self.net.head(features, batch.task))
        for teacher in self.teacher:  # one, or none in the first task
            with torch.no_grad():
                old = teacher(batch.x)
            loss = loss + self.strength * (old - features).square().sum() / 2
        return loss


def last_dropouts(net: Network) -> list[str]:
    """Return the names of the dropout layers at the end of the trunk: in evaluation mode they return the trunk's output."""
    outputs: dict[nn.Module, Tensor] = {}
    named = {name: part for name, part in net.trunk.named_modules() if isinstance(part, nn.Dropout | nn.AlphaDropout)}
    hooks = [part.register_forward_hook(lambda part, _, out: outputs.update({part: out})) for part in named.values()]
    mode = net.training
    with torch.no_grad():
        features = net.eval().trunk(net.example)
    net.train(mode)
    for hook in hooks:
        hook.remove()
    return [name for name, part in named.items() if outputs.get(part) is features]
