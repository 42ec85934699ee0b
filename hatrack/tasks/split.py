"""Data sets as tensors: a Split, the View a task has of its images, and the Batch that one step sees."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from hatrack.tasks.transform import Transform, scaled

TaskId = int | Tensor  # one task, or one per example


class Batch(NamedTuple):
    """All that one step sees. The last three are 0-d tensors, because a recorded step can't read Python numbers anew."""

    x: Tensor  # (batch, *shape), float
    y: Tensor  # (batch,), int64
    task: TaskId
    step: Tensor  # the number of this batch in its epoch, from 0
    steps: Tensor  # batches in this epoch
    seen: Tensor  # the share of the epoch's examples that came before this batch


Place = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


def place(t: Tensor) -> Place:
    """Tensors with the same place hold the same values."""
    return t.data_ptr(), t.shape, t.stride(), t.dtype


@dataclass(frozen=True)
class Split:
    """A data set as tensors: example i is row rows[i] of x, which tasks and splits may share."""

    x: Tensor  # (images, *raw shape), uint8 or float, as stored
    y: Tensor  # (examples,), int64
    task: TaskId  # of the whole split, or (examples,)
    transform: Transform
    rows: Tensor  # (examples,), int64
    augment: bool = False  # random crops and flips of what is trained on
    crops: Tensor | None = None  # (examples, 3): those of this epoch, drawn anew by the trainer
    on_host: bool = False  # the images stay in the host's memory, and a Feed brings those of the next steps to the device

    def __len__(self) -> int:
        return len(self.y)

    def raw(self, index: Tensor) -> Tensor:
        """The images with these numbers, as stored."""
        rows = self.rows[index]
        return (
            self.x.index_select(0, rows.to(self.x.device)).to(rows.device) if self.on_host else self.x.index_select(0, rows)
        )

    def inputs(self, index: Tensor) -> Tensor:
        """The images with these numbers, as the network sees them, without crops."""
        return self.transform(self.raw(index), self.task[index] if isinstance(self.task, Tensor) else None)

    def fetch(self, index: Tensor) -> list[Tensor]:
        """What is stored of the examples with these numbers: images and labels; tasks and crops where they have any."""
        parts = [self.raw(index), self.y[index]]
        parts += [self.task[index]] if isinstance(self.task, Tensor) else []
        return parts + ([] if self.crops is None else [self.crops[index]])

    def batch(self, parts: Sequence[Tensor], step: Tensor, steps: Tensor, size: int) -> Batch:
        """The batch of what was fetched; `size` is that of a full one."""
        raw, y, *others = parts
        task = others.pop(0) if isinstance(self.task, Tensor) else self.task
        x = self.transform(raw, task if isinstance(task, Tensor) else None, *others)
        return Batch(x, y, task, step, steps, step * (size / max(1, len(self))))

    def take(self, index: Tensor, step: Tensor, steps: Tensor, size: int) -> Batch:
        """The batch of the examples with these numbers."""
        return self.batch(self.fetch(index), step, steps, size)

    def part(self, index: Tensor) -> Self:
        """Some of the examples, by number; the images are not copied."""
        task = self.task[index] if isinstance(self.task, Tensor) else self.task
        return replace(self, y=self.y[index], rows=self.rows[index], task=task)

    @staticmethod
    def join(splits: Sequence["Split"]) -> "Split":
        """One split of many, one per task; images that several of them share are kept once."""
        mixed = len({split.x.dtype for split in splits}) > 1
        stores: dict[Place, tuple[int, Tensor]] = {}
        first = 0
        for split in splits:
            if place(split.x) not in stores:
                stores[place(split.x)] = (first, scaled(split.x) if mixed else split.x)
                first += len(split.x)
        width = max(x[0].numel() for _, x in stores.values())
        tasks = [int(split.task) for split in splits]
        count = max(tasks) + 1
        shape = splits[0].transform.shape
        if any(split.transform.shape != shape for split in splits):
            raise ValueError(f"tasks of different image shapes can't be joined: {[s.transform.shape for s in splits]}")
        row = dict(zip(tasks, splits, strict=True))
        transforms = [row.get(k, splits[0]).transform for k in range(count)]
        pixels = None
        if any(transform.pixels is not None for transform in transforms):
            plain = torch.arange(math.prod(shape), device=splits[0].y.device)[None]
            pixels = torch.cat([plain if transform.pixels is None else transform.pixels for transform in transforms])
        flat = [x.flatten(1) for _, x in stores.values()]
        return Split(
            x=flat[0] if len(flat) == 1 else torch.cat([F.pad(x, (0, width - x.shape[1])) for x in flat]),
            y=torch.cat([split.y for split in splits]),
            task=torch.cat([torch.full_like(split.y, k) for k, split in zip(tasks, splits, strict=True)]),
            transform=Transform(
                shape, torch.cat([v.mean for v in transforms]), torch.cat([v.std for v in transforms]), pixels
            ),
            rows=torch.cat([split.rows + stores[place(split.x)][0] for split in splits]),
            augment=splits[0].augment,
            on_host=splits[0].on_host,
        )
