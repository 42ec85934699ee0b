"""PNN: progressive neural networks (Rusu, Rabinowitz, Desjardins and others, 2016), https://arxiv.org/abs/1606.04671

Every task gets a new column of layers, which also reads the hidden layers of all earlier columns; those are frozen. The
details are those of the HAT authors' code (https://arxiv.org/abs/1801.01423). Departures from it: dropout is off in earlier
columns; the lateral connections into the outputs, which that code has but never uses, are left out.
"""

from itertools import islice
from typing import Annotated, Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hatrack.methods.fit import Fit
from hatrack.methods.method import Method
from hatrack.methods.parts.on_host import OnHost
from hatrack.methods.parts.stages import Stage, layer_like, stages, training_only
from hatrack.methods.parts.used_tensors import used_modules
from hatrack.methods.stored_images import ProbesOption, stored_images
from hatrack.networks.heads import grouped
from hatrack.networks.initial_weights import initialise
from hatrack.networks.network import Network
from hatrack.options import Option, check
from hatrack.seeds import seeded
from hatrack.tasks.split import TaskId
from hatrack.tasks.task import Task


class Lateral(nn.Module):
    """The lateral connection from earlier columns into a layer of a new one: U relu(V [scale_1 h_1, scale_2 h_2, ...])."""

    def __init__(self, layer: nn.Module, columns: int, inputs: int, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(columns))
        kind: Any = type(layer)
        self.v: nn.Module = nn.Linear(columns * inputs, inputs) if kind is nn.Linear else kind(columns * inputs, inputs, 1)
        self.u = layer_like(layer, inputs, width)

    def forward(self, hidden: list[Tensor]) -> Tensor:
        scaled = [scale * h for scale, h in zip(self.scale, hidden, strict=True)]
        return self.u(F.relu(self.v(torch.cat(scaled, 1))))  # type: ignore[no-any-return]


class Column(nn.Module):
    """The stages of one column, and a lateral connection into each of them but the first."""

    def __init__(self, parts: list[Stage], laterals: list[Lateral]) -> None:
        super().__init__()
        self.stages, self.laterals = nn.ModuleList(parts), nn.ModuleList(laterals)

    def forward(self, x: Tensor, earlier: list[list[Tensor]]) -> list[Tensor]:
        """Return the outputs of its stages, given those of all earlier columns."""
        hidden: list[Tensor] = []
        for number, stage in enumerate(self.stages):
            more = self.laterals[number - 1]([h[number - 1] for h in earlier]) if number and earlier else None
            hidden.append(stage(hidden[-1] if number else x, more))
        return hidden


class PNN(Method):
    """Progressive neural networks: a column per task that reads the frozen columns of all earlier tasks.

    A column is a copy of the trunk with new weights. Lateral connections add to each of its layers what the same layers of
    the earlier columns compute. Nothing is forgotten, and the network grows with every task.

    Args:
        net: the network; the method trains it in place. The options are listed by `hatrack list pnn`.

    Example:
        >>> method = hr.PNN(hr.Network(trunk, tasks=tasks), columns="full")
        >>> for task in tasks:
        ...     method.learn(task, hr.Trainer(hr.Regime(epochs=20)))

    See docs/methods/pnn.md for formulas, published values and results.
    """

    scenarios = ("task",)

    step_forms = "many"
    exchanges = False

    owned: Tensor  # (tasks,): the column of every task; -1: not learned yet

    def __init__(
        self,
        net: Network,
        *,
        columns: Annotated[
            Literal["full", "budget"], Option("as wide as the network, or so narrow that all columns are about its size")
        ] = "full",
        budget_tasks: Annotated[
            int, Option("columns that share the budget; 0: as many as the network has tasks in the beginning", low=0)
        ] = 0,
        expand: Annotated[
            float, Option("budget: a column has EXPAND / BUDGET_TASKS of the network's width", above=0, high=1000)
        ] = 1.117,
        probes: ProbesOption = 0,
    ) -> None:
        super().__init__(net)
        self.options = check(PNN, locals())
        self.stored_images = stored_images(probes, net.example)
        self.pattern = stages(net)
        self.full = columns == "full"
        share = budget_tasks or max(1, len(net.classes))
        self.widths = [s.width if self.full else max(1, int(expand * s.width / share)) for s in self.pattern]
        self.features = net.features
        self.columns = nn.ModuleList()  # in the order of learning
        self.heads = nn.ModuleList()  # one per task
        self.register_buffer("owned", torch.zeros(0, dtype=torch.int64, device=net.example.device))
        self.read_owned = OnHost()
        self.learning = self.column = -1  # the task being learned and its column; set by `learn_task`
        self.on_new_tasks()

    # Columns

    def on_new_tasks(self) -> None:
        """Make a head and a column for every task of the network."""
        for task in range(len(self.heads), len(self.net.classes)):
            self._add_column()
            own = self.full and task < len(self.net.heads)
            self.heads.append(
                self.net.heads[task] if own else self.net.new_head(0 if self.net.shared else task, features=self.features)
            )
            self.owned = torch.cat([self.owned, self.owned.new_full((1,), -1)])

    @torch.no_grad()
    def _add_column(self) -> None:
        """Add a column. Its weights depend on the seed and its number only; the first of full width is the trunk itself."""
        number = len(self.columns)
        if self.full and number == 0:
            self.columns.append(Column(self.pattern, []))
            return
        parts: list[Stage] = []
        laterals: list[Lateral] = []
        x = self.net.example.cpu()
        with seeded(self.net.seed, "column", number):
            for stage, width in zip(self.pattern, self.widths, strict=True):
                if parts and number:
                    laterals.append(Lateral(stage.layer, number, x.shape[1], width))
                parts.append(stage.fresh(x, width))
                x = parts[-1](x)
            column = Column(parts, laterals)
            initialise(column, self.net.init)
        self.columns.append(column.to(self.net.example))
        self.features = x.shape[1]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **keywords: Any) -> None:
        """Make as many columns as the state has, then load it. (If tasks were learned again, there are more columns than
        tasks.)"""
        first = f"{prefix}columns."
        numbers = {key.removeprefix(first).split(".")[0] for key in state_dict if key.startswith(first)}
        while len(self.columns) < len(numbers):
            self._add_column()
        del self.columns[max(len(numbers), len(self.heads)) :]
        super()._load_from_state_dict(state_dict, prefix, *args, **keywords)

    def train(self, mode: bool = True) -> Self:
        """Set the mode; only the column that is being learned has dropout, not the finished ones that it reads."""
        super().train(mode)
        for number, column in enumerate(self.columns):
            column.train(mode and number == self.column)
        return self

    # Forward

    def column_of(self, task: int) -> int:
        """Return the number of the column of a task; that of the next column, if the task is not learned yet."""
        if task == self.learning:
            return self.column
        owned: list[int] = self.read_owned(self.owned)
        return owned[task] if owned[task] >= 0 else max(owned) + 1

    def forward(self, x: Tensor, task: TaskId) -> Tensor:
        if isinstance(task, Tensor):
            return grouped(self, x, task)
        hidden: list[list[Tensor]] = []
        for column in islice(self.columns, self.column_of(task) + 1):
            hidden.append(column(x, hidden))
        return self.heads[task](hidden[-1][-1])  # type: ignore[no-any-return]

    # Learning

    def learn_task(self, task: Task, fit: Fit) -> None:
        column = int(self.owned.max()) + 1
        not_learned = int((self.owned < 0).sum())
        again = bool(self.owned[task.index] >= 0)  # then it needs one more column, since others may read its old one
        while len(self.columns) < column + not_learned + again:
            self._add_column()
        self.learning, self.column = task.index, column
        with training_only(self, [*self.columns[column].parameters(), *self.heads[task.index].parameters()]):
            fit(self, task)
        self.owned[task.index] = column

    def end_learning(self) -> None:
        self.learning = self.column = -1
        needed = int(self.owned.max()) + 1 + int((self.owned < 0).sum())
        del self.columns[needed:]  # a column for a task that could not be learned again

    def num_parameters(self) -> int:
        """Return the number of weights, without those of the original network, which is only the pattern."""
        return sum(p.numel() for p in [*self.columns.parameters(), *self.heads.parameters()])

    def used_by(self, task: int) -> dict[str, Tensor]:
        """Return its own column, those before it, and its head."""
        columns = islice(self.columns, self.column_of(task) + 1)
        return used_modules({**{f"column {k}": column for k, column in enumerate(columns)}, "head": self.heads[task]})
