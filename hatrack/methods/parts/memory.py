"""Episodic memories: examples of earlier tasks in tables of a fixed size, as the network sees them (float32, or int64).

The tables are buffers, so that checkpoints contain them. Adding and sampling obey the rule of the step (`method.py`): every
example of a batch is written to some row. Those that are not kept are written to row 0, which is never sampled.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hatrack.networks.network import Network
from hatrack.networks.packed_heads import mixing_tasks
from hatrack.tasks.split import TaskId

if TYPE_CHECKING:
    from hatrack.methods.method import Method

STEP = ("forward", "loss", "edit_grads", "constrain")  # what runs inside the training step


class Examples(NamedTuple):
    """Examples that were sampled from a memory."""

    x: Tensor  # (examples, *shape)
    y: Tensor  # (examples,)
    task: Tensor  # (examples,)
    more: dict[str, Tensor]  # the further columns, by name: (examples, *shape)


class Rows(NamedTuple):
    """Rows of a memory to draw from, while nothing is added to it."""

    numbers: Tensor  # (rows of the memory,): the numbers of these rows, then zeros
    total: Tensor  # 0-d: how many they are


class Memory(nn.Module, ABC):
    """Tables of images, labels and tasks. A subclass decides in `_rows` where an example is written.

    Args:
        example: images with the shape of those that will be kept.
        columns: further columns of floats, by name, with the shape of one row: `logits=(10,)`.
    """

    x: Tensor
    y: Tensor
    task: Tensor
    used: Tensor  # (rows,): whether this row contains an example
    new: Tensor  # 0-d: how many of the next examples have not been seen before

    def __init__(self, example: Tensor, **columns: Sequence[int]) -> None:
        super().__init__()
        self.columns = tuple(columns)
        kind = torch.int64 if example.dtype == torch.int64 else torch.float32  # token ids, or images
        self.register_buffer("x", torch.zeros(1, *example.shape[1:], dtype=kind, device=example.device))
        self.register_buffer("y", torch.zeros(1, dtype=torch.int64, device=example.device))
        self.register_buffer("task", torch.zeros_like(self.y))
        self.register_buffer("used", torch.zeros_like(self.y, dtype=torch.bool))
        self.register_buffer("new", torch.zeros_like(self.y[0]))
        for name, shape in columns.items():
            self.register_buffer(name, torch.zeros(1, *shape, device=example.device, dtype=torch.float32))

    @abstractmethod
    def _rows(self, y: Tensor, task: Tensor, new: Tensor) -> Tensor:
        """Return the row (batch,) of every example, 0 if it is not kept.

        Args:
            y: labels (batch,).
            task: the tasks of the examples (batch,).
            new: which examples are new (batch,); those come first, and the others are not kept.
        """

    def grow(self, classes: Sequence[int], *, counted_on: bool = False) -> None:
        """Add rows for new tasks, in a memory that reserves rows for each class. Not to be called in a step.

        Args:
            classes: the number of classes of every task.
            counted_on: whether the labels of a task begin after those of the tasks before it, or at 0.
        """

    def _extend(self, rows: int) -> None:
        """Add empty rows."""
        for name in ("x", "y", "task", "used", *self.columns):
            table = self.get_buffer(name)
            setattr(self, name, torch.cat([table, table.new_zeros(rows, *table.shape[1:])]))

    def widen(self, column: str, width: int) -> None:
        """Pad the last dimension of a further column with zeros to at least this width. Not to be called in a step."""
        table = self.get_buffer(column)
        setattr(self, column, F.pad(table, (0, max(0, width - table.shape[-1]))))

    def expect(self, count: int) -> None:
        """Announce that the next `count` examples are new. `add` ignores those after them: they are from a later epoch."""
        self.new.fill_(count)

    @torch.no_grad()
    def add(self, x: Tensor, y: Tensor, task: TaskId, **more: Tensor) -> None:
        """Offer a batch to the memory. The result is the same as if the examples came one by one.

        Args:
            x: images as the network sees them.
            y: labels.
            task: the task, or a tensor of tasks, one per example.
            more: the values of every further column.
        """
        number = torch.arange(len(y), device=y.device)
        tasks = task if isinstance(task, Tensor) else torch.full_like(y, task)
        new = number < self.new
        row = torch.where(new, self._rows(y, tasks, new), 0)
        self.new.sub_(len(y)).clamp_(min=0)
        # Of several examples for one row, all write the last one, so that the order of writing does not matter.
        last = torch.where(row == row[:, None], number, 0).amax(1)
        self.x[row], self.y[row], self.task[row] = x[last], y[last], tasks[last]
        for name in self.columns:
            self.get_buffer(name)[row] = more[name][last]
        self.used[row] = row > 0

    def sample(self, count: int, among: Rows | None = None) -> Examples:
        """Draw examples with replacement.

        Args:
            count: how many.
            among: the rows to draw from, which costs the same however many rows there are; None: all that have an example.

        Returns:
            The examples; row 0, which is blank, if there are none to draw from.
        """
        if among is None:
            number = self.used.cumsum(0)  # (rows,): how many examples there are up to this row
            drawn = (uniform(count, number.device) * number[-1]).long()
            row = torch.searchsorted(number, drawn, right=True) % len(number)
        else:
            row = among.numbers[(uniform(count, among.numbers.device) * among.total).long()]
        more = {name: self.get_buffer(name)[row] for name in self.columns}
        return Examples(self.x[row], self.y[row], self.task[row], more)

    def without(self, task: int) -> Rows:
        """Return the rows that have examples of other tasks than this one. Not to be called in a step."""
        chosen = self.used & (self.task != task)
        numbers = chosen.nonzero().flatten()
        return Rows(F.pad(numbers, (0, len(chosen) - len(numbers))), chosen.sum())

    def forget(self, task: int) -> None:
        """Remove the examples of a task."""
        self.used.logical_and_(self.task != task)
        self.y[0], self.task[0] = 0, 0  # if none is left, steps look at row 0, and any network has this class of this task

    def tasks(self) -> set[int]:
        """Return the tasks that have examples in the memory. Not to be called in a step."""
        return set(self.task[self.used].tolist())


class Reservoir(Memory):
    """A fixed number of slots; every example seen so far is in it with the same probability (Vitter 1985, algorithm R)."""

    seen: Tensor

    def __init__(self, slots: int, example: Tensor, **columns: Sequence[int]) -> None:
        super().__init__(example, **columns)
        self.slots = slots
        self._extend(slots)
        self.register_buffer("seen", torch.zeros_like(self.new))

    def _rows(self, y: Tensor, task: Tensor, new: Tensor) -> Tensor:
        """Choose the slot of example number N, from 0: N while slots are free, then j drawn from 0..N, if that is a slot."""
        number = self.seen + torch.arange(len(y), device=y.device)
        drawn = (uniform(len(y), y.device) * (number + 1)).long()
        slot = torch.where(number < self.slots, number, drawn)
        self.seen.add_(new.sum())
        return torch.where(slot < self.slots, slot + 1, 0)


class Ring(Memory):
    """A ring buffer for every class of every task, which contains its last `per_class` examples."""

    first: Tensor  # (tasks,): the number of a task's label 0 among the classes of all tasks; 0 if labels are counted on
    written: Tensor  # (classes of all tasks,): how many examples were written so far

    def __init__(self, per_class: int, example: Tensor, **columns: Sequence[int]) -> None:
        super().__init__(example, **columns)
        self.per_class = per_class
        self.register_buffer("first", torch.zeros_like(self.y[:0]))
        self.register_buffer("written", torch.zeros_like(self.y[:0]))

    def grow(self, classes: Sequence[int], *, counted_on: bool = False) -> None:
        for count in classes[len(self.first) :]:
            self.first = torch.cat([self.first, self.first.new_full((1,), 0 if counted_on else len(self.written))])
            self.written = torch.cat([self.written, self.written.new_zeros(count)])
            self._extend(count * self.per_class)

    def _rows(self, y: Tensor, task: Tensor, new: Tensor) -> Tensor:
        label = self.first[task] + y  # among the classes of all tasks
        before = torch.ones(len(y), len(y), dtype=torch.bool, device=y.device).tril(-1)  # [i, j]: j comes before i
        number = self.written[label] + ((label == label[:, None]) & before).sum(1)
        self.written.index_add_(0, label, new.long())
        return 1 + label * self.per_class + number % self.per_class


def uniform(count: int, device: torch.device) -> Tensor:
    """Draw numbers from [0, 1) in float64: with the 24 bits of float32, some slots would be more likely than others after
    millions of examples."""
    return torch.rand(count, dtype=torch.float64, device=device)


def head_sizes(net: Network) -> list[int]:
    """Return how many logits an example of each task has when the task is learned."""
    if net.incremental:
        return list(accumulate(net.classes))
    return net.classes[:1] * len(net.classes) if net.shared else net.classes


def grow_with(memory: Memory, net: Network) -> None:
    """Add rows to a memory for the new tasks of a network."""
    memory.grow(net.classes if net.incremental else head_sizes(net), counted_on=net.incremental)


def unused_heads(net: Network, tasks: Collection[int]) -> list[nn.Parameter]:
    """Return the parameters of all heads that belong to none of these tasks.

    A batch that mixes tasks gives them a gradient of zeros, with which weight decay and momentum would still move them. So
    they must have no gradient at all.
    """
    heads = [] if net.shared else [head for k, head in enumerate(net.heads) if k not in tasks]
    if net.incremental:  # the rows of earlier classes are used all the same
        heads = list(net.heads)[max(tasks, default=-1) + 1 :]
    return [parameter for head in heads for parameter in head.parameters()]


def mixing(method: "Method", kind: "type[Method]", tasks: Collection[int]) -> AbstractContextManager[None]:
    """Say that in the block batches mix these tasks and no others: see `packed_heads.py`.

    A class of the user's own that changes the step may take a head, its gradient or all parameters by themselves, so that it
    gets heads with memory of their own.

    Args:
        method: the method.
        kind: the class whose steps know that heads can be packed.
        tasks: the tasks.
    """
    same = all(getattr(type(method), name) is getattr(kind, name) for name in STEP)
    return mixing_tasks(method.net, tasks) if same else nullcontext()
