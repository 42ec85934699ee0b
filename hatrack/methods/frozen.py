"""SGD-F, a reference of the HAT paper (Serra et al., ICML 2018), https://arxiv.org/abs/1801.01423

The trunk is trained on the first task and then frozen; later tasks train only their heads.
"""

from typing import Self

import torch
from torch import Tensor

from hatrack.methods.fit import Fit
from hatrack.methods.method import Method
from hatrack.methods.parts.stages import training_only
from hatrack.methods.parts.task_norms import check_frozen
from hatrack.methods.parts.used_tensors import used_of_network
from hatrack.methods.stored_images import ProbesOption, stored_images
from hatrack.networks.network import Network
from hatrack.options import check
from hatrack.tasks.task import Task


class Frozen(Method):
    """The trunk is trained on the first task only; every later task trains its own head on those features.

    Nothing is forgotten, and nothing is learned but linear classifiers: a reference for methods that protect earlier tasks.

    Args:
        net: the network; the method trains it in place.

    Example:
        >>> method = hr.Frozen(hr.Network(trunk, tasks=tasks))
        >>> for task in tasks:
        ...     method.learn(task, hr.Trainer(hr.Regime(epochs=20)))

    See docs/methods/frozen.md for formulas, published values and results.
    """

    scenarios = ("task",)

    step_forms = "two"

    started: Tensor  # 0-d: whether a task has been learned

    def __init__(self, net: Network, *, probes: ProbesOption = 0) -> None:
        super().__init__(net)
        self.options = check(Frozen, locals())
        self.stored_images = stored_images(probes, net.example)
        if net.shared:
            raise ValueError("frozen needs a head per task: a head that all tasks share would be overwritten")
        check_frozen(net, "frozen")
        self.register_buffer("started", torch.zeros((), dtype=torch.bool, device=net.example.device))

    def learn_task(self, task: Task, fit: Fit) -> None:
        trained = [] if self.started else [p for p in self.net.trunk.parameters() if p.requires_grad]
        with training_only(self.net.trunk, trained):
            fit(self, task)
        self.started.fill_(True)

    def train(self, mode: bool = True) -> Self:
        """Set the mode. After the first task, modules with buffers stay in evaluation mode, so that running statistics are
        frozen like the weights."""
        super().train(mode)
        for module in self.net.trunk.modules():
            if self.started and next(module.buffers(recurse=False), None) is not None:
                module.training = False
        return self

    def used_by(self, task: int) -> dict[str, Tensor]:
        return used_of_network(self.net, task, {})
