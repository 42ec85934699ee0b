"""A fresh network per task: the accuracy that each task reaches by itself, at T times the size.

The HAT paper's authors call it sgd-restart (https://arxiv.org/abs/1801.01423); nothing is shared, so nothing is forgotten.
"""

import copy
from typing import Self

from torch import Tensor, nn

from hatrack.methods.fit import Fit
from hatrack.methods.method import Method
from hatrack.methods.parts.snapshot import Snapshot
from hatrack.methods.parts.used_tensors import used_modules
from hatrack.methods.stored_images import ProbesOption, stored_images
from hatrack.networks.heads import grouped
from hatrack.networks.network import Network
from hatrack.options import check
from hatrack.tasks.split import TaskId
from hatrack.tasks.task import Task


class Independent(Method):
    """A fresh network per task, all starting from the same weights: nothing shared, nothing forgotten.

    It shows which accuracy each task reaches alone. A method that transfers knowledge between tasks can do better.

    Args:
        net: the network; the method trains it in place.

    Example:
        >>> method = hr.Independent(hr.Network(trunk, tasks=tasks))
        >>> for task in tasks:
        ...     method.learn(task, hr.Trainer(hr.Regime(epochs=20)))

    See docs/methods/independent.md for formulas, published values and results.
    """

    scenarios = ("task",)

    step_forms = "two"
    exchanges = False

    def __init__(self, net: Network, *, probes: ProbesOption = 0) -> None:
        super().__init__(net)
        self.options = check(Independent, locals())
        self.stored_images = stored_images(probes, net.example)
        self.initial = Snapshot(net.trunk)
        self.trunks = nn.ModuleList([net.trunk])  # one per task
        self.heads = nn.ModuleList(net.heads[:1])  # if the network has one shared head, each task gets its own here
        self.on_new_tasks()

    def on_new_tasks(self) -> None:
        for _ in range(len(self.trunks), len(self.net.classes)):
            self.trunks.append(copy.deepcopy(self.net.trunk))
            self.initial.restore(self.trunks[-1])
            if self.net.shared:
                self.heads.append(self.net.new_head(0))

    def train(self, mode: bool = True) -> Self:
        """Set the mode; parts of the trunks that the user froze stay in evaluation mode."""
        super().train(mode)
        for trunk in self.trunks:
            self.net.keep_frozen(trunk)
        return self

    def forward(self, x: Tensor, task: TaskId) -> Tensor:
        if isinstance(task, Tensor):
            return grouped(self, x, task)
        features = self.trunks[task](x)
        return self.heads[task](features) if self.net.shared else self.net.head(features, task)

    def learn_task(self, task: Task, fit: Fit) -> None:
        fit(
            self, task, lr=fit.regime.lr, batch=fit.regime.batch, keep_state=False
        )  # every task is trained like a first task

    def used_by(self, task: int) -> dict[str, Tensor]:
        head = self.heads[task] if self.net.shared else self.net.heads[task]
        return used_modules({"trunk": self.trunks[task], "head": head})
