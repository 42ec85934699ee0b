"""DEN: dynamically expandable networks (Yoon, Yang, Lee, Hwang, ICLR 2018), https://arxiv.org/abs/1708.01547

A new task retrains the units that it needs, adds units if these are not enough, and copies units whose weights change too
much. Afterwards it uses only the units that existed when it was learned. Departures, with reasons in docs/methods/den.md:
softmax cross-entropy; the group of a new unit is all its incoming weights; only new units and the new head read the copies,
old units go on reading old units.
"""

from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hatrack.methods.evaluate import evaluate
from hatrack.methods.fit import Fit
from hatrack.methods.method import Method
from hatrack.methods.parts.expandable import NOT_ADDED, ExpandableLayers, Layer, masks_between, masks_without
from hatrack.methods.parts.freeze import Freeze
from hatrack.networks.heads import grouped
from hatrack.networks.network import Network
from hatrack.options import Option, check
from hatrack.seeds import generator
from hatrack.tasks.split import Batch, TaskId
from hatrack.tasks.task import Task


class DEN(Method):
    """Dynamically expandable networks: selective retraining, new units when needed, copies of units that drift.

    A new task first trains its head with an L1 penalty, then retrains the units from which weights lead to that head. If the
    loss stays high, new units are added to every layer, and those that group sparsity sets to 0 are removed. Units whose
    weights changed too much are copied: the copy belongs to the new task, the original gets its old weights back.

    Args:
        net: the network; the method trains it in place. The options are listed by `hatrack list den`.

    Example:
        >>> method = hr.DEN(hr.Network(trunk, tasks=tasks), expand=10)
        >>> for task in tasks:
        ...     method.learn(task, hr.Trainer(hr.Regime(epochs=20)))

    See docs/methods/den.md for formulas, published values and results.
    """

    scenarios = ("task",)

    step_forms = "many"
    exchanges = False

    turns: Tensor  # (tasks,): the position of every task in the order of learning, from 1; 0: not learned

    def __init__(
        self,
        net: Network,
        *,
        expand: Annotated[int, Option("units added to every layer, and units copied at most, per task", low=0)] = 10,
        room: Annotated[int, Option("units that every layer can grow by in all", low=1)] = 200,
        loss_threshold: Annotated[float, Option("units are added if the training loss stays above this", low=0)] = 0.01,
        split_threshold: Annotated[float, Option("a unit is copied if its weights moved further than this", low=0)] = 0.05,
        l1: Annotated[float, Option("what a step takes off the size of every weight", low=0)] = 1e-5,
        l2: Annotated[float, Option("pull of the weights towards 0", low=0)] = 1e-4,
        group: Annotated[float, Option("what a step takes off the norm of a new unit's weights", low=0)] = 1e-3,
        drift: Annotated[float, Option("pull of the weights towards those before the task", low=0)] = 0.5,
        head_epochs: Annotated[int, Option("epochs of the new head alone; 0: those of the regime", low=0)] = 2,
        retrain_epochs: Annotated[int, Option("epochs of the retraining; 0: those of the regime", low=0)] = 0,
        expand_epochs: Annotated[int, Option("epochs with new units; 0: those of the regime", low=0)] = 0,
        split_epochs: Annotated[int, Option("epochs with copied units; 0: those of the regime", low=0)] = 0,
    ) -> None:
        super().__init__(net)
        self.options = check(DEN, locals())
        self.expand, self.loss_threshold, self.split_threshold = expand, loss_threshold, split_threshold
        self.l1, self.l2, self.group, self.drift = l1, l2, group, drift
        self.head_epochs, self.retrain_epochs = head_epochs, retrain_epochs
        self.expand_epochs, self.split_epochs = expand_epochs, split_epochs
        self.room = ExpandableLayers(net, room)
        self.register_buffer("turns", torch.zeros(0, dtype=torch.int16, device=net.example.device))
        self.trained: list[nn.Parameter] = []  # in the present fit; this and the next three are set by `learn_task`
        self.freezes: list[Freeze] = []  # of the entries that are not trained
        self.anchors: list[tuple[nn.Parameter, Tensor, Tensor]] = []  # the values before the task, and a mask of them
        self.new_units: list[Tensor] = []  # a mask of the spare units of every layer, while group sparsity acts on them
        self.on_new_tasks()

    def on_new_tasks(self) -> None:
        self.room.grow(self.net)
        new = len(self.net.classes) - len(self.turns)
        if new:
            self.turns = torch.cat([self.turns, self.turns.new_zeros(new)])

    def units_of(self, task: int) -> list[Tensor]:
        """Return a mask of the units of every layer that existed when the task was learned; all, if it is not learned."""
        position = self.turns[task]
        return self.room.units_until(torch.where(position == 0, NOT_ADDED - 1, position))

    def forward(self, x: Tensor, task: TaskId) -> Tensor:
        if isinstance(task, Tensor):
            return grouped(self, x, task)
        return self.room.run(self.net, x, task, self.units_of(task))

    # Learning

    def learn_task(self, task: Task, fit: Fit) -> None:
        t = task.index
        self._remove_units_of(t)  # if it was learned before
        position = int(self.turns.max()) + 1
        self.turns[t] = position
        old = self.room.read(self.net, t)
        existing = masks_between(self.units_of(t), old)
        if position == 1:  # the first task trains the whole network
            self._train(task, fit, existing, 0)
            return
        self._set_anchors(t, old, existing)
        # Selective retraining: the new head alone, then the units that lead to it
        self._train(task, fit, masks_without(existing, existing), self.head_epochs)
        self._train(task, fit, masks_between(self.select(t), old), self.retrain_epochs)
        # Expansion: new units, if the loss is still high; those that are not needed are removed again
        if evaluate(self, task.train).loss > self.loss_threshold and self._expand(t, position):
            self._train(task, fit, masks_without(masks_between(self.units_of(t), old), existing), self.expand_epochs)
            self._remove_unneeded(t, position)
        # Split: units that moved too far are copied, and everything is trained once more
        if self._split(t, position, old, existing):
            self._train(task, fit, masks_between(self.units_of(t), old), self.split_epochs)

    def end_learning(self) -> None:
        self.trained, self.freezes, self.anchors, self.new_units = [], [], [], []

    def _remove_units_of(self, task: int) -> None:
        """Count a task as not learned, and remove the units that no other finished task uses."""
        self.turns[task] = 0
        self.room.born[self.room.born > self.turns.max()] = NOT_ADDED

    def _set_anchors(self, task: int, old: list[Layer], existing: list[Layer]) -> None:
        """Pull all existing weights towards their present values, except those of a head that is the task's own."""
        layers = list(zip(self.room.layers(self.net, task), old, existing, strict=True))
        for layer, values, mask in layers if self.net.shared else layers[:-1]:
            for (parameter, value), (_, where) in zip(layer.split(values), layer.split(mask), strict=True):
                self.anchors.append((parameter, value, where.to(value)))

    def _train(self, task: Task, fit: Fit, masks: list[Layer], epochs: int) -> None:
        """Train the weights in these masks; all others keep their bits."""
        layers = zip(self.room.layers(self.net, task.index), masks, strict=True)
        parts = [part for layer, mask in layers for part in layer.split(mask)]
        self.trained = [parameter for parameter, mask in parts if mask.any()]
        self.freezes = [Freeze(parameter, ~mask) for parameter, mask in parts if not mask.all()]
        changes: dict[str, Any] = {"epochs": epochs} if epochs else {}
        fit(self, task, **changes)

    def select(self, task: int) -> list[Tensor]:
        """Return a mask of the units of every layer from which non-zero weights lead to the head."""
        layers, selected = self.room.read(self.net, task), []
        above = torch.ones_like(layers[-1].bias, dtype=torch.bool)
        for layer, units in zip(layers[:0:-1], reversed(self.units_of(task)), strict=True):  # from the head downwards
            above = (layer.weight[above] != 0).any(0) & units
            selected.append(above)
        return selected[::-1]

    def _expand(self, task: int, position: int) -> bool:
        """Add units to every layer; return whether any were added. Only new units read them at first, so that the logits
        do not change."""
        new = [self.room.add_units(level, self.expand, position) for level in range(len(self.room.born))]
        layers, source = self.room.read(self.net, task), generator(self.net.seed, "units", task, position)
        for level, (units, mask) in enumerate(zip(new, masks_between(self.units_of(task), layers), strict=False)):
            weight, inputs = layers[level].weight, mask.weight[units]
            drawn = torch.rand(inputs.shape, generator=source, dtype=torch.float32).mul(2).sub(1).to(weight)
            weight[units] = torch.where(inputs, drawn / inputs.sum(1, keepdim=True).to(weight).sqrt(), 0)
            layers[level].bias[units] = 0
            layers[level + 1].weight[:, units] = 0
        self.room.write(self.net, task, layers)
        self.new_units = list((self.room.born == position).unbind())
        return any(len(units) for units in new)

    def _remove_unneeded(self, task: int, position: int) -> None:
        """Remove the new units whose incoming weights have all become 0."""
        layers = self.room.read(self.net, task)
        for born, layer, mask in zip(self.room.born, layers, masks_between(self.units_of(task), layers), strict=False):
            has_inputs = ((layer.weight != 0) & mask.weight).any(1)[-len(born) :]
            born[~has_inputs & (born == position)] = NOT_ADDED
        self.new_units = []

    def _split(self, task: int, position: int, old: list[Layer], existing: list[Layer]) -> bool:
        """Copy the units that moved too far; return whether there were any.

        The copy keeps the present weights, and the unit gets its old ones back. What is new in this task (copies, new units,
        a head of its own) reads the copies instead of the units; old units go on reading the units.
        """
        layers = self.room.read(self.net, task)
        pairs = []
        for level, ((weight, bias), before) in enumerate(zip(layers[:-1], old, strict=False)):
            units = self.drifted(weight, before.weight, existing[level].weight)
            copies = self.room.add_units(level, len(units), position)
            units = units[: len(copies)]
            weight[copies], bias[copies] = weight[units], bias[units]
            weight[units], bias[units] = before.weight[units], before.bias[units]
            pairs.append((units, copies))
        head = torch.full_like(layers[-1].bias, not self.net.shared, dtype=torch.bool)
        new_above = [*self.room.units_added_at(position)[1:], head]
        for (units, copies), above, new in zip(pairs, layers[1:], new_above, strict=True):
            read = above.weight[:, units]
            above.weight[:, copies] = torch.where(new[:, None], read, 0)
            above.weight[:, units] = torch.where(new[:, None], 0, read)
        self.room.write(self.net, task, layers)
        return any(len(units) for units, _ in pairs)

    def drifted(self, now: Tensor, before: Tensor, existing: Tensor) -> Tensor:
        """Return the units whose incoming weights moved further than the threshold, at most `expand`, the furthest first."""
        moved: Tensor = ((now - before) * existing).norm(dim=1)
        order = moved.argsort(descending=True, stable=True)[: self.expand]
        return order[moved[order] > self.split_threshold]

    # In the step

    def loss(self, batch: Batch) -> Tensor:
        """Return cross-entropy + l2/2 |W|^2 + drift/2 |W - W_old|^2."""
        loss = super().loss(batch)
        for parameter in self.trained:
            loss = loss + self.l2 / 2 * parameter.square().sum()
        for parameter, old, where in self.anchors:
            loss = loss + self.drift / 2 * ((parameter - old) * where).square().sum()
        return loss

    def edit_grads(self, batch: Batch, aux: Any) -> None:
        for freeze in self.freezes:
            freeze.mask_grad()

    def constrain(self) -> None:
        """Take the proximal steps of the L1 norm and of group sparsity; then restore the bits of what is not trained."""
        for parameter in self.trained:
            if parameter.dim() == 2:
                parameter.copy_(F.softshrink(parameter, self.l1))
        for rows, new in zip(self.room.rows, self.new_units, strict=False):
            rows.copy_(torch.where(new[:, None], shrink_rows(rows, self.group), rows))
        for freeze in self.freezes:
            freeze.restore()

    # Inspecting

    def widths(self) -> dict[str, int]:
        """Return how many units every layer has now."""
        counts = (self.room.born < NOT_ADDED).sum(1).tolist()
        return {stage.name: stage.width + count for stage, count in zip(self.room.stages, counts, strict=True)}


def shrink_rows(weight: Tensor, by: float) -> Tensor:
    """Make every row shorter by this much, or 0: the proximal step of the sum of the rows' norms."""
    factor: Tensor = 1 - by / weight.norm(dim=1, keepdim=True).clamp(min=max(by, 1e-30))
    return weight * factor
