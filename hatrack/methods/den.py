"""DEN: dynamically expandable networks (Yoon, Yang, Lee, Hwang, ICLR 2018), https://arxiv.org/abs/1708.01547

A new task retrains the units that it needs, adds units if these are not enough, and copies units that it moves too far. It
goes on seeing the units of its time only. Departures, with reasons in docs/methods/den.md: softmax cross-entropy; the group
of a new unit is all that it reads; only what is new in a task reads the copies, old units go on reading old units.
"""

from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hatrack.methods.evaluate import evaluate
from hatrack.methods.fit import Fit
from hatrack.methods.method import Method
from hatrack.methods.parts.expandable import UNBORN, ExpandableLayers, Layer, between, beyond
from hatrack.methods.parts.freeze import Freeze
from hatrack.networks.heads import grouped
from hatrack.networks.network import Network
from hatrack.options import Option, check
from hatrack.seeds import generator
from hatrack.tasks.split import Batch, TaskId
from hatrack.tasks.task import Task


class DEN(Method):
    """Dynamically expandable networks: selective retraining, new units when needed, copies of units that drift."""

    turns: Tensor  # (tasks,): the place of every task in the order of learning, from 1; 0: not learned

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
        self.free: list[nn.Parameter] = []  # what moves in a fit; this and the next three are set anew by `learn`
        self.freezes: list[Freeze] = []
        self.anchors: list[tuple[nn.Parameter, Tensor, Tensor]] = []  # values before the task, and where they count
        self.fresh: list[Tensor] = []  # the new units in the room of every layer, while groups of weights shrink
        self.grow()

    def grow(self) -> None:
        self.room.grow(self.net)
        new = len(self.net.classes) - len(self.turns)
        if new:
            self.turns = torch.cat([self.turns, self.turns.new_zeros(new)])

    def seen(self, task: int) -> list[Tensor]:
        """The units of every layer that existed when the task was learned; all there are if it is not learned."""
        turn = self.turns[task]
        return self.room.seen(torch.where(turn == 0, UNBORN - 1, turn))

    def forward(self, x: Tensor, task: TaskId) -> Tensor:
        if isinstance(task, Tensor):
            return grouped(self, x, task)
        self.net.check_task_id(task)
        return self.room.run(self.net, x, task, self.seen(task))

    # Learning

    def learn_task(self, task: Task, fit: Fit) -> None:
        t = task.index
        self._give_up(t)
        turn = int(self.turns.max()) + 1
        self.turns[t] = turn
        old = self.room.copy(self.net, t)
        there = between(self.seen(t), old)
        if turn == 1:
            self._fit(task, fit, there, 0)
            return
        self._anchor(t, old, there)
        self._fit(task, fit, beyond(there, there), self.head_epochs)
        self._fit(task, fit, between(self.select(t), old), self.retrain_epochs)
        if evaluate(self, task.train).loss > self.loss_threshold and self._expand(t, turn):
            self._fit(task, fit, beyond(between(self.seen(t), old), there), self.expand_epochs)
            self._delete(t, turn)
        if self._split(t, turn, old, there):
            self._fit(task, fit, between(self.seen(t), old), self.split_epochs)

    def end_learning(self) -> None:
        self.free, self.freezes, self.anchors, self.fresh = [], [], [], []

    def _give_up(self, task: int) -> None:
        """A task that is learned again: units that no other finished task has seen are gone."""
        self.turns[task] = 0
        self.room.born[self.room.born > self.turns.max()] = UNBORN

    def _anchor(self, task: int, old: list[Layer], there: list[Layer]) -> None:
        """What is there is pulled back to where it is now, but for a head that is the task's own."""
        layers = list(zip(self.room.wide(self.net, task), old, there, strict=True))
        for wide, values, mask in layers if self.net.shared else layers[:-1]:
            for (parameter, value), (_, where) in zip(wide.cut(values), wide.cut(mask), strict=True):
                self.anchors.append((parameter, value, where.to(value)))

    def _fit(self, task: Task, fit: Fit, masks: list[Layer], epochs: int) -> None:
        """Train what the masks name; everything else keeps its bits."""
        layers = zip(self.room.wide(self.net, task.index), masks, strict=True)
        shares = [share for wide, mask in layers for share in wide.cut(mask)]
        self.free = [parameter for parameter, moves in shares if moves.any()]
        self.freezes = [Freeze(parameter, ~moves) for parameter, moves in shares if not moves.all()]
        changes: dict[str, Any] = {"epochs": epochs} if epochs else {}
        fit(self, task, **changes)

    def select(self, task: int) -> list[Tensor]:
        """The units from which non-zero weights lead to the head, found layer by layer from the top."""
        layers, chosen = self.room.copy(self.net, task), []
        above = torch.ones_like(layers[-1].bias, dtype=torch.bool)
        for layer, seen in zip(layers[:0:-1], reversed(self.seen(task)), strict=True):
            above = (layer.weight[above] != 0).any(0) & seen
            chosen.append(above)
        return chosen[::-1]

    def _expand(self, task: int, turn: int) -> bool:
        """New units in every layer. Only new units read them so far, so that the logits are as they were."""
        new = [self.room.take(level, self.expand, turn) for level in range(len(self.room.born))]
        layers, source = self.room.copy(self.net, task), generator(self.net.seed, "units", task, turn)
        for level, (units, mask) in enumerate(zip(new, between(self.seen(task), layers), strict=False)):
            weight, reads = layers[level].weight, mask.weight[units]
            drawn = torch.rand(reads.shape, generator=source).mul(2).sub(1).to(weight)
            weight[units] = torch.where(reads, drawn / reads.sum(1, keepdim=True).sqrt(), 0)
            layers[level].bias[units] = 0
            layers[level + 1].weight[:, units] = 0
        self.room.write(self.net, task, layers)
        self.fresh = list((self.room.born == turn).unbind())
        return any(len(units) for units in new)

    def _delete(self, task: int, turn: int) -> None:
        """New units that read nothing any more are gone."""
        layers = self.room.copy(self.net, task)
        for born, layer, mask in zip(self.room.born, layers, between(self.seen(task), layers), strict=False):
            reads = ((layer.weight != 0) & mask.weight).any(1)[-len(born) :]
            born[~reads & (born == turn)] = UNBORN
        self.fresh = []

    def _split(self, task: int, turn: int, old: list[Layer], there: list[Layer]) -> bool:
        """Units that moved too far: a copy goes on from here, the unit itself goes back. What is new in this task (copies,
        new units, a head of its own) reads the copies in place of the units; old units go on reading the units."""
        layers = self.room.copy(self.net, task)
        pairs = []
        for level, ((weight, bias), was) in enumerate(zip(layers[:-1], old, strict=False)):
            units = self.drifted(weight, was.weight, there[level].weight)
            copies = self.room.take(level, len(units), turn)
            units = units[: len(copies)]
            weight[copies], bias[copies] = weight[units], bias[units]
            weight[units], bias[units] = was.weight[units], was.bias[units]
            pairs.append((units, copies))
        head = torch.full_like(layers[-1].bias, not self.net.shared, dtype=torch.bool)
        for (units, copies), above, new in zip(pairs, layers[1:], [*self.room.added(turn)[1:], head], strict=True):
            read = above.weight[:, units]
            above.weight[:, copies] = torch.where(new[:, None], read, 0)
            above.weight[:, units] = torch.where(new[:, None], 0, read)
        self.room.write(self.net, task, layers)
        return any(len(units) for units, _ in pairs)

    def drifted(self, now: Tensor, before: Tensor, there: Tensor) -> Tensor:
        """The units whose incoming weights moved further than the threshold, at most `expand`, the furthest first."""
        moved: Tensor = ((now - before) * there).norm(dim=1)
        order = moved.argsort(descending=True, stable=True)[: self.expand]
        return order[moved[order] > self.split_threshold]

    # In the step

    def loss(self, batch: Batch) -> Tensor:
        loss = super().loss(batch)
        for parameter in self.free:
            loss = loss + self.l2 / 2 * parameter.square().sum()
        for parameter, old, where in self.anchors:
            loss = loss + self.drift / 2 * ((parameter - old) * where).square().sum()
        return loss

    def edit_grads(self, batch: Batch, aux: Any) -> None:
        for freeze in self.freezes:
            freeze.mask_grad()

    def constrain(self) -> None:
        """The proximal steps of the L1 norm and of the groups; then what does not move in this phase has its bits back."""
        for parameter in self.free:
            if parameter.dim() == 2:
                parameter.copy_(F.softshrink(parameter, self.l1))
        for rows, fresh in zip(self.room.rows, self.fresh, strict=False):
            rows.copy_(torch.where(fresh[:, None], shrink_rows(rows, self.group), rows))
        for freeze in self.freezes:
            freeze.restore()

    # Looking at it

    def widths(self) -> dict[str, int]:
        """How many units every layer has now."""
        counts = (self.room.born < UNBORN).sum(1).tolist()
        return {stage.name: stage.width + count for stage, count in zip(self.room.stages, counts, strict=True)}


def shrink_rows(weight: Tensor, by: float) -> Tensor:
    """Every row shorter by this much, or 0: the proximal step of the sum of the rows' norms."""
    factor: Tensor = 1 - by / weight.norm(dim=1, keepdim=True).clamp(min=max(by, 1e-30))
    return weight * factor
