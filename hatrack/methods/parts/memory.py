"""Episodic memories: examples of earlier tasks, kept in tables of a fixed size as the network sees them (float32).

The tables are buffers, so a checkpoint holds them. Adding and drawing obey the rule of the step (`method.py`): every example
of a batch is written somewhere, those that are not kept into row 0, which is never drawn.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hatrack.networks.network import Network
from hatrack.tasks.split import TaskId


class Examples(NamedTuple):
    """What a memory gives back."""

    x: Tensor  # (examples, *shape)
    y: Tensor  # (examples,)
    task: Tensor  # (examples,)
    more: dict[str, Tensor]  # the further columns, by name: (examples, *shape)


class Memory(nn.Module, ABC):
    """Tables of images, labels and tasks. A kind of memory says in `_rows` where an example goes.

    Args:
        example: images like those that are to be kept.
        columns: further columns of floats, by name, with the shape of one row: `logits=(10,)`.
    """

    x: Tensor
    y: Tensor
    task: Tensor
    used: Tensor  # (rows,): does this row hold an example?
    new: Tensor  # 0-d: how many of the examples to come have not been seen before

    def __init__(self, example: Tensor, **columns: Sequence[int]) -> None:
        super().__init__()
        self.columns = tuple(columns)
        self.register_buffer("x", torch.zeros(1, *example.shape[1:], device=example.device))
        self.register_buffer("y", torch.zeros(1, dtype=torch.int64, device=example.device))
        self.register_buffer("task", torch.zeros_like(self.y))
        self.register_buffer("used", torch.zeros_like(self.y, dtype=torch.bool))
        self.register_buffer("new", torch.zeros_like(self.y[0]))
        for name, shape in columns.items():
            self.register_buffer(name, torch.zeros(1, *shape, device=example.device))

    @abstractmethod
    def _rows(self, y: Tensor, task: Tensor, new: Tensor) -> Tensor:
        """The row (batch,) of every example, 0 if it is not kept; called with what is new, which comes first."""

    def grow(self, classes: Sequence[int]) -> None:
        """Room for tasks of so many classes each, where a kind of memory has room for each of them. Not in a step."""

    def _extend(self, rows: int) -> None:
        for name in ("x", "y", "task", "used", *self.columns):
            table = self.get_buffer(name)
            setattr(self, name, torch.cat([table, table.new_zeros(rows, *table.shape[1:])]))

    def widen(self, column: str, width: int) -> None:
        """Make the last dimension of a further column at least this wide, filled up with zeros. Not in a step."""
        table = self.get_buffer(column)
        setattr(self, column, F.pad(table, (0, max(0, width - table.shape[-1]))))

    def expect(self, count: int) -> None:
        """The next `count` examples are new. Those after them were seen in an earlier epoch, and `add` passes them over."""
        self.new.fill_(count)

    @torch.no_grad()
    def add(self, x: Tensor, y: Tensor, task: TaskId, **more: Tensor) -> None:
        """Offer a batch of any size, with the values of every further column. It ends as if the examples had come one by
        one: of two for one row the later stays."""
        place = torch.arange(len(y), device=y.device)
        owner = task if isinstance(task, Tensor) else torch.full_like(y, task)
        new = place < self.new
        row = torch.where(new, self._rows(y, owner, new), 0)
        self.new.sub_(len(y)).clamp_(min=0)
        last = torch.where(row == row[:, None], place, 0).amax(
            1
        )  # all that write to one row write the same: any order will do
        self.x[row], self.y[row], self.task[row] = x[last], y[last], owner[last]
        for name in self.columns:
            self.get_buffer(name)[row] = more[name][last]
        self.used[row] = row > 0

    def sample(self, count: int, without: int | None = None) -> Examples:
        """Draw with replacement from all that is kept, or from that of other tasks than one; row 0 if there is nothing."""
        used = self.used if without is None else self.used & (self.task != without)
        number = used.cumsum(0)  # (rows,): how many there are up to this row
        drawn = (uniform(count, number.device) * number[-1]).long()
        row = torch.searchsorted(number, drawn, right=True) % len(number)
        more = {name: self.get_buffer(name)[row] for name in self.columns}
        return Examples(self.x[row], self.y[row], self.task[row], more)

    def forget(self, task: int) -> None:
        """Give up what is kept of a task."""
        self.used.logical_and_(self.task != task)

    def tasks(self) -> set[int]:
        """Those that something is kept of. Not in a step."""
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
        """Example number N, from 0: slot N while there is room, then j drawn from 0..N, kept if that is a slot."""
        number = self.seen + torch.arange(len(y), device=y.device)
        drawn = (uniform(len(y), y.device) * (number + 1)).long()
        slot = torch.where(number < self.slots, number, drawn)
        self.seen.add_(new.sum())
        return torch.where(slot < self.slots, slot + 1, 0)


class Ring(Memory):
    """The last `per_class` examples of every class of every task."""

    first: Tensor  # (tasks,): the number of a task's class 0 among the classes of all tasks
    written: Tensor  # (classes of all tasks,)

    def __init__(self, per_class: int, example: Tensor, **columns: Sequence[int]) -> None:
        super().__init__(example, **columns)
        self.per_class = per_class
        self.register_buffer("first", torch.zeros_like(self.y[:0]))
        self.register_buffer("written", torch.zeros_like(self.y[:0]))

    def grow(self, classes: Sequence[int]) -> None:
        for count in classes[len(self.first) :]:
            self.first = torch.cat([self.first, self.first.new_full((1,), len(self.written))])
            self.written = torch.cat([self.written, self.written.new_zeros(count)])
            self._extend(count * self.per_class)

    def _rows(self, y: Tensor, task: Tensor, new: Tensor) -> Tensor:
        kind = self.first[task] + y
        before = torch.ones(len(y), len(y), dtype=torch.bool, device=y.device).tril(-1)  # [i, j]: does j come before i?
        turn = self.written[kind] + ((kind == kind[:, None]) & before).sum(1)
        self.written.index_add_(0, kind, new.long())
        return 1 + kind * self.per_class + turn % self.per_class


def uniform(count: int, device: torch.device) -> Tensor:
    """Numbers from [0, 1) in float64: the 24 bits of float32 would favour some slots once there were a million examples."""
    return torch.rand(count, dtype=torch.float64, device=device)


def room(net: Network) -> list[int]:
    """How many classes each task of a network may have."""
    return net.classes[:1] * len(net.classes) if net.shared else net.classes


def idle(net: Network, tasks: Collection[int]) -> list[nn.Parameter]:
    """The heads of no task among these. A batch that mixes tasks would give them a gradient of zeros, and so to the
    optimizer a reason to move them (weight decay, momentum); they should have none."""
    heads = [] if net.shared else [head for k, head in enumerate(net.heads) if k not in tasks]
    return [parameter for head in heads for parameter in head.parameters()]
