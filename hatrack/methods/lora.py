"""LoRA: low-rank adapters (Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang, Chen, 2021), https://arxiv.org/abs/2106.09685

An adapter per task on a frozen trunk: what people use today for many tasks on one pretrained network. The paper adapts one
task; a set of adapters for every task is the obvious extension. A trunk that is not frozen is trained by the first task,
exactly as by `frozen`, and adapters begin with the second one.
"""

from typing import Annotated, Self

import torch
from torch import Tensor, nn

from hatrack.methods.fit import Fit
from hatrack.methods.method import Method
from hatrack.methods.parts.stages import training_only
from hatrack.methods.parts.task_norms import check_frozen
from hatrack.methods.parts.used_tensors import used_modules, used_of_network
from hatrack.methods.serving import ServedNetwork, ServedTask
from hatrack.methods.stored_images import ProbesOption, stored_images
from hatrack.networks.adapters import Rank, Scale, adaptable_weights, low_rank_pair
from hatrack.networks.freezing import has_buffers
from hatrack.networks.heads import grouped
from hatrack.networks.network import Network
from hatrack.options import Option, check
from hatrack.seeds import seeded
from hatrack.tasks.split import TaskId
from hatrack.tasks.task import Task
from hatrack.tracing.training_pass import check_switch


class LoRA(Method):
    """Low-rank adapters: every task has its own small addition to the weights of a frozen trunk, and its own head.

    A weight W of the trunk is W + scale B A for a task. The task trains A, B and its head; W stays as it is. Nothing but the
    trunk is shared, so nothing is forgotten. If the trunk is not frozen, the first task trains it, without an adapter.

    Args:
        net: the network; the method trains it in place. The options are listed by `hatrack list lora`.

    Example:
        >>> method = hr.LoRA(hr.Network(trunk, tasks=tasks, freeze="*"), rank=4)
        >>> for task in tasks:
        ...     method.learn(task, hr.Trainer(hr.Regime(epochs=20)))

    See docs/methods/lora.md for formulas, published values and results.
    """

    scenarios = ("task",)

    step_forms = "two"

    started: Tensor  # 0-d: whether a task has been learned

    def __init__(
        self,
        net: Network,
        *,
        rank: Rank = 8,
        adapt: Annotated[str, Option("layers with adapters: patterns of names, separated by commas")] = "*",
        scale: Scale = 1.0,
        probes: ProbesOption = 0,
    ) -> None:
        super().__init__(net)
        self.options = check(LoRA, locals())
        if net.shared:
            raise ValueError("lora needs a head per task: a head that all tasks share would be overwritten")
        self.stored_images = stored_images(probes, net.example)
        self.rank, self.scale = rank, scale
        self.names = adaptable_weights(net.trunk, adapt)
        self.pretrained = not any(p.requires_grad for p in net.trunk.parameters())
        self.adapters = nn.ModuleList()  # per task, an nn.ParameterList of A, B, A, B, ... in the order of `names`
        self.trains_trunk = False  # while the first task trains the trunk; set by `learn_task`
        check_switch(net.trunk, self.names)
        check_frozen(net, "lora")
        self.register_buffer("started", torch.zeros((), dtype=torch.bool, device=net.example.device))
        self.on_new_tasks()

    def on_new_tasks(self) -> None:
        """Make an adapter for every task of the network; its initial values depend on the seed and the task only."""
        weights = [self.net.trunk.get_parameter(name) for name in self.names]
        for task in range(len(self.adapters), len(self.net.classes)):
            with seeded(self.net.seed, "adapter", task):
                pairs = [low_rank_pair(weight.detach(), self.rank) for weight in weights]
            self.adapters.append(nn.ParameterList([matrix for pair in pairs for matrix in pair]))

    def train(self, mode: bool = True) -> Self:
        """Set the mode. Once the trunk is frozen, its modules with buffers stay in evaluation mode, so that running
        statistics are frozen like the weights."""
        super().train(mode)
        frozen = self.pretrained or bool(self.started)
        for module in self.net.trunk.modules() if frozen else ():
            if has_buffers(module):
                module.training = False
        return self

    def forward(self, x: Tensor, task: TaskId) -> Tensor:
        if isinstance(task, Tensor):
            return grouped(self, x, task)
        return self.net.run_with(self._adapted(task), x, task)

    def _adapted(self, task: int) -> dict[str, Tensor]:
        """Return the weights W + scale B A of a task, by their names in the network."""
        if self.trains_trunk:
            return {}
        matrices = list(self.adapters[task].parameters())
        found = {}
        for name, a, b in zip(self.names, matrices[::2], matrices[1::2], strict=True):
            weight = self.net.trunk.get_parameter(name)
            found[f"trunk.{name}"] = weight + (self.scale * (b @ a)).view_as(weight)
        return found

    def served(self, task: int) -> ServedTask:
        return ServedNetwork(self.net, task, self._adapted(task))

    def learn_task(self, task: Task, fit: Fit) -> None:
        self.trains_trunk = not self.pretrained and not self.started
        trained = [p for p in self.net.trunk.parameters() if p.requires_grad] if self.trains_trunk else []
        with training_only(self.net.trunk, trained):
            fit(self, task)
        self.started.fill_(True)

    def end_learning(self) -> None:
        self.trains_trunk = False

    def used_by(self, task: int) -> dict[str, Tensor]:
        return {**used_of_network(self.net, task, {}), **used_modules({"adapter": self.adapters[task]})}
