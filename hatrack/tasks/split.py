"""Data sets as tensors: a Split with its Transform, and the Batch that one training step gets."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from hatrack.tasks.stream import Stream, join_streams
from hatrack.tasks.targets import CLASSES, Target, cross_entropies
from hatrack.tasks.transform import Transform, scaled

TaskId = int | Tensor  # one task, or one per example


def task_ids(task: Tensor, images: int, tasks: int | None = None) -> Tensor:
    """Return the numbers of tasks as int64; raise an error unless they are whole numbers, one per image.

    Args:
        task: the numbers.
        images: how many images there are.
        tasks: how many tasks there are, to check the numbers themselves, which reads them from the device; None: no check.
    """
    if task.shape != (images,):
        raise ValueError(f"one task number per image is needed: {images} images, numbers of shape {tuple(task.shape)}")
    if task.dtype is torch.bool or task.is_floating_point() or task.is_complex():
        raise ValueError(f"task numbers must be whole numbers such as int64, not {str(task.dtype).removeprefix('torch.')}")
    if tasks is not None and (wrong := [number for number in set(task.tolist()) if not 0 <= number < tasks]):
        raise IndexError(f"no task {wrong[0]}: the network has {tasks} (add_task makes room for one more)")
    return task.long()


class Batch(NamedTuple):
    """All that one training step gets: what `Method.loss` and `Method.edit_grads` are handed.

    `step`, `steps` and `seen` are 0-d tensors, because a recorded step reads Python numbers only once.

    Attributes:
        x: images as the network sees them, (batch, *shape), float; or token ids, int64.
        y: labels, (batch,), int64; or what else the task's target asks for.
        task: the number of the task, or a tensor of numbers, one per example, if a batch mixes tasks.
        step: the number of this batch in its epoch, from 0.
        steps: how many batches the epoch has.
        seen: the share of the epoch's examples that came before this batch.
        target: what the task asks for.

    Example:
        >>> class Decay(hr.Method):
        ...     def loss(self, batch):
        ...         size = sum(p.square().sum() for p in self.net.trunk.parameters())
        ...         return batch.loss(self(batch.x, batch.task)) + 1e-4 * size
    """

    x: Tensor
    y: Tensor
    task: TaskId
    step: Tensor
    steps: Tensor
    seen: Tensor
    target: Target = CLASSES

    def loss(self, outputs: Tensor) -> Tensor:
        """Return the mean loss of outputs on this batch, a 0-d tensor: the cross-entropy, or what the task asks for."""
        if isinstance(self.task, Tensor) and self.target.smoothing:  # tasks may have other numbers of classes
            return cross_entropies(outputs, self.y, self.target.smoothing).mean()
        return self.target.loss(outputs, self.y)


Place = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


def place(t: Tensor) -> Place:
    """Return where a tensor lies in memory: tensors with the same place hold the same values."""
    return t.data_ptr(), t.shape, t.stride(), t.dtype


def shape_text(shape: Sequence[int]) -> str:
    """Return the shape of an image, or of a vector, in words: "images 1x28x28" or "vectors of 784"."""
    if len(shape) == 1:
        return f"vectors of {shape[0]}"
    return f"{'images' if len(shape) == 3 else 'inputs'} {'x'.join(map(str, shape))}"


@dataclass(frozen=True, repr=False)
class Split:
    """A data set as tensors: the training, validation or test data of a task. Splits may share their images.

    Attributes:
        x: stored images, (images, *raw shape), uint8 or float; example i is row rows[i]. Of streamed images a tensor on the
            device "meta", which has their shape and type but no data.
        y: labels, (examples,), int64; or what else the target asks for.
        task: the number of the task, or a tensor (examples,) if the split mixes tasks.
        transform: turns stored images into what the network sees.
        rows: the row of each example in x, (examples,), int64.
        augment: whether training uses random crops and flips.
        crops: the crops of the present epoch, (examples, 3); the trainer draws them.
        on_host: whether the images stay in the host's memory, from where a Prefetcher brings them to the device.
        target: what the labels are, and how outputs are compared with them.
        stream: reads the images anew whenever they are needed; None: they are in memory.

    Example:
        >>> split = tasks[0].test
        >>> split
        Split(50 examples of task 0, images 1x28x28)
        >>> split.inputs(torch.arange(2)).shape  # as the network sees them
        torch.Size([2, 1, 28, 28])
    """

    x: Tensor
    y: Tensor
    task: TaskId
    transform: Transform
    rows: Tensor
    augment: bool = False
    crops: Tensor | None = None
    on_host: bool = False
    target: Target = CLASSES
    stream: Stream | None = None

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:
        of = "several tasks" if isinstance(self.task, Tensor) else f"task {self.task}"
        return f"Split({len(self)} examples of {of}, {shape_text(self.transform.shape)})"

    def raw(self, index: Tensor) -> Tensor:
        """Return the images with these numbers, as stored."""
        rows = self.rows[index]
        if self.stream is not None:
            return self.stream.read(rows).to(rows.device)
        return (
            self.x.index_select(0, rows.to(self.x.device)).to(rows.device) if self.on_host else self.x.index_select(0, rows)
        )

    def inputs(self, index: Tensor) -> Tensor:
        """Return the images with these numbers (a tensor of int64) as the network sees them, without crops."""
        return self._seen(self.raw(index), index)

    def _seen(self, raw: Tensor, index: Tensor) -> Tensor:
        return self.transform(raw, self.task[index] if isinstance(self.task, Tensor) else None)

    def read(self, batches: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches one after the other; streamed images are read ahead.

        Args:
            batches: the numbers of the examples of each batch.

        Yields:
            The numbers of a batch, and its images as the network sees them, without crops.
        """
        if self.stream is None:
            yield from ((index, self.inputs(index)) for index in batches)
            return
        rows = [self.rows[index].cpu() for index in batches]
        for index, raw in zip(batches, self.stream.read_all(rows), strict=True):
            yield index, self._seen(raw.to(index.device), index)

    def fetch(self, index: Tensor) -> list[Tensor]:
        """Return what is stored of the examples with these numbers: images, labels, and tasks and crops if they have any."""
        parts = [self.raw(index), self.y[index]]
        parts += [self.task[index]] if isinstance(self.task, Tensor) else []
        return parts + ([] if self.crops is None else [self.crops[index]])

    def batch(self, parts: Sequence[Tensor], step: Tensor, steps: Tensor, size: int) -> Batch:
        """Return the batch of what was fetched; `size` is that of a full one."""
        raw, y, *others = parts
        task = others.pop(0) if isinstance(self.task, Tensor) else self.task
        x = self.transform(raw, task if isinstance(task, Tensor) else None, *others)
        return Batch(x, y, task, step, steps, step * (size / max(1, len(self))), self.target)

    def take(self, index: Tensor, step: Tensor, steps: Tensor, size: int) -> Batch:
        """Return the batch of the examples with these numbers; `size` is that of a full one."""
        return self.batch(self.fetch(index), step, steps, size)

    def laid_out(self) -> Self:
        """Return a split whose stored images have their pixels where the network sees them. They are copied for it, unless
        they are in the host's memory, streamed, of several tasks, or have their pixels there already."""
        transform, size = self.transform, 4096
        if transform.pixels is None or self.on_host or self.stream is not None or isinstance(self.task, Tensor):
            return self
        moved = [transform.move_pixels(self.x.index_select(0, rows)) for rows in torch.split(self.rows, size)]
        rows = torch.arange(len(self), device=self.rows.device)
        return replace(self, x=torch.cat(moved), rows=rows, transform=replace(transform, pixels=None))

    def part(self, index: Tensor) -> Self:
        """Return a split of the examples with these numbers; the images are not copied."""
        task = self.task[index] if isinstance(self.task, Tensor) else self.task
        return replace(self, y=self.y[index], rows=self.rows[index], task=task)

    @staticmethod
    def join(splits: Sequence["Split"]) -> "Split":
        """Join splits, one per task, into one that mixes tasks; images that several of them share are kept once."""
        mixed = len({split.x.dtype for split in splits}) > 1
        stores: dict[Place | Stream, tuple[int, Split]] = {}
        first = 0
        for split in splits:
            if _store(split) not in stores:
                stores[_store(split)] = (first, split)
                first += len(split.x)
        width = max(split.x[0].numel() for _, split in stores.values())
        tasks = [int(split.task) for split in splits]
        count = max(tasks) + 1
        shape = splits[0].transform.shape
        if other := [split.target for split in splits if split.target is not CLASSES]:
            raise ValueError(
                f"tasks can be joined if all have plain classes, not with the target {other[0].kind!r} or weights"
            )
        if any(split.transform.shape != shape for split in splits):
            raise ValueError(f"tasks of different image shapes can't be joined: {[s.transform.shape for s in splits]}")
        row = dict(zip(tasks, splits, strict=True))
        transforms = [row.get(k, splits[0]).transform for k in range(count)]
        pixels = None
        if any(transform.pixels is not None for transform in transforms):
            plain = torch.arange(math.prod(shape), device=splits[0].y.device)[None]
            pixels = torch.cat([plain if transform.pixels is None else transform.pixels for transform in transforms])
        x, stream = _joined([split for _, split in stores.values()], width, mixed=mixed)
        return Split(
            x=x,
            y=torch.cat([split.y for split in splits]),
            task=torch.cat([torch.full_like(split.y, k) for k, split in zip(tasks, splits, strict=True)]),
            transform=Transform(
                shape, torch.cat([v.mean for v in transforms]), torch.cat([v.std for v in transforms]), pixels
            ),
            rows=torch.cat([split.rows + stores[_store(split)][0] for split in splits]),
            augment=splits[0].augment,
            on_host=splits[0].on_host or stream is not None,
            stream=stream,
        )


def _store(split: Split) -> Place | Stream:
    """Return what splits with the same images have in common."""
    return place(split.x) if split.stream is None else split.stream


def _joined(splits: Sequence[Split], width: int, *, mixed: bool) -> tuple[Tensor, Stream | None]:
    """Return the images of several stores as one, flattened and padded to a width, and the stream if one is streamed."""
    if any(split.stream for split in splits):
        stream = join_streams([split.stream for split in splits], [split.x for split in splits], width, mixed=mixed)
        kind = torch.float32 if mixed else splits[0].x.dtype
        return torch.empty(sum(len(split.x) for split in splits), width, dtype=kind, device="meta"), stream
    flat = [(scaled(split.x) if mixed else split.x).flatten(1) for split in splits]
    return flat[0] if len(flat) == 1 else torch.cat([F.pad(x, (0, width - x.shape[1])) for x in flat]), None
