"""What is learned: a Split (a data set as tensors), a Batch (what one step sees) and a Task (train, validation, test)."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

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


def scaled(x: Tensor) -> Tensor:
    """As float; uint8 from [0, 255] to [0, 1]."""
    return x.float().div(255) if x.dtype == torch.uint8 else x.float()


@dataclass(frozen=True)
class View:
    """How tasks see raw images: pixel i of an image is raw pixel pixels[i] (-1: a blank), then (value - mean) / std.

    Permutations, rotations, padding and gray-to-colour are all such maps, so a task never copies the data it is made of.
    Each table has one row, or one row per task for a split that mixes tasks.
    """

    shape: tuple[int, ...]
    mean: Tensor  # (rows, channels), in units of the scaled image (uint8 is divided by 255)
    std: Tensor
    pixels: Tensor | None = None  # (rows, pixels), int64; None: as they lie

    def __call__(self, raw: Tensor, row: Tensor | None = None) -> Tensor:
        """Images (batch, *shape) as the network sees them; `row` says whose view each example takes."""
        x = raw.flatten(1)
        if self.pixels is not None:
            if row is None:
                pixels = self.pixels[0]
                x = x.index_select(1, pixels.clamp(min=0)).masked_fill(pixels < 0, 0)
            else:
                pixels = self.pixels[row]
                x = x.gather(1, pixels.clamp(min=0)).masked_fill(pixels < 0, 0)
        x = x.reshape(len(x), *self.shape)
        x = scaled(x)
        mean, std = (t[row] if row is not None else t for t in (self.mean, self.std))
        dims = (-1, mean.shape[1]) + (1,) * (len(self.shape) - 1)
        return x.sub(mean.view(dims)).div(std.view(dims))


@dataclass(frozen=True)
class Split:
    """A data set as tensors: example i is row rows[i] of x, which tasks and splits may share."""

    x: Tensor  # (images, *raw shape), uint8 or float, as stored
    y: Tensor  # (examples,), int64
    task: TaskId  # of the whole split, or (examples,)
    view: View
    rows: Tensor  # (examples,), int64

    def __len__(self) -> int:
        return len(self.y)

    def inputs(self, index: Tensor) -> Tensor:
        """The images with these numbers, as the network sees them."""
        raw = self.x.index_select(0, self.rows[index])
        return self.view(raw, self.task[index] if isinstance(self.task, Tensor) else None)

    def take(self, index: Tensor, step: Tensor, steps: Tensor, batch: int) -> Batch:
        """The batch of the examples with these numbers; `batch` is the size of a full one."""
        task = self.task[index] if isinstance(self.task, Tensor) else self.task
        return Batch(self.inputs(index), self.y[index], task, step, steps, step * (batch / max(1, len(self))))

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
        shape = splits[0].view.shape
        if any(split.view.shape != shape for split in splits):
            raise ValueError(f"tasks of different image shapes can't be joined: {[s.view.shape for s in splits]}")
        row = dict(zip(tasks, splits, strict=True))
        views = [row.get(k, splits[0]).view for k in range(count)]
        pixels = None
        if any(view.pixels is not None for view in views):
            plain = torch.arange(int(np.prod(shape)), device=splits[0].x.device)[None]
            pixels = torch.cat([plain if view.pixels is None else view.pixels for view in views])
        flat = [x.flatten(1) for _, x in stores.values()]
        return Split(
            x=flat[0] if len(flat) == 1 else torch.cat([torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in flat]),
            y=torch.cat([split.y for split in splits]),
            task=torch.cat([torch.full_like(split.y, k) for k, split in zip(tasks, splits, strict=True)]),
            view=View(shape, torch.cat([v.mean for v in views]), torch.cat([v.std for v in views]), pixels),
            rows=torch.cat([split.rows + stores[place(split.x)][0] for split in splits]),
        )


@dataclass(frozen=True)
class Task:
    """One thing to learn: its number in the sequence, its classes, and its data."""

    index: int
    name: str
    classes: int
    train: Split
    valid: Split
    test: Split

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one image, as the network sees it."""
        return self.train.view.shape

    @classmethod
    def from_arrays(
        cls,
        index: int,
        name: str,
        x_train: Any,
        y_train: Any,
        x_test: Any,
        y_test: Any,
        *,
        classes: int | None = None,
        valid: float = 0.15,
        seed: int = 0,
        mean: float | Sequence[float] = 0.0,
        std: float | Sequence[float] = 1.0,
    ) -> Self:
        """A task of one's own arrays or tensors.

        Images are (n, height, width), (n, height, width, channels) or (n, channels, height, width), vectors (n, features);
        uint8 is scaled to [0, 1]. Labels are whole numbers from 0. A share `valid` of the training set is held out.
        """
        if not 0 <= valid < 1:
            raise ValueError(f"valid must be a share from 0 to below 1, not {valid!r}")
        index = operator.index(index)
        train = store(f"task {name!r}, training", x_train, y_train)
        test = store(f"task {name!r}, test", x_test, y_test)
        if train[0].shape[1:] != test[0].shape[1:]:
            raise ValueError(
                f"task {name!r}: training images are {tuple(train[0].shape[1:])}, test images {tuple(test[0].shape[1:])}"
            )
        if classes is None:
            classes = int(train[1].max()) + 1
        for part, (_, y) in (("training", train), ("test", test)):
            check_labels(f"task {name!r}, {part}", y, classes, every=part == "training")
        return cls.build(index, name, classes, train, test, normal(train[0].shape[1:], mean, std), valid=valid, seed=seed)

    @classmethod
    def build(
        cls,
        index: int,
        name: str,
        classes: int,
        train: tuple[Tensor, Tensor],
        test: tuple[Tensor, Tensor],
        view: View,
        *,
        valid: float,
        seed: int,
        keep: tuple[Tensor, Tensor] | None = None,
    ) -> Self:
        """From stored images, of which `keep` names the rows for training and test. Nothing is checked or copied."""
        rows = keep or (torch.arange(len(train[0])), torch.arange(len(test[0])))
        whole = Split(train[0], train[1], index, view, rows[0])
        held, rest = hold_out(len(whole), valid, seed)
        return cls(index, name, classes, whole.part(rest), whole.part(held), Split(test[0], test[1], index, view, rows[1]))


def hold_out(count: int, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """The numbers of the examples held out for validation, and of the rest, as the HAT paper's authors draw them."""
    order = np.arange(count)
    np.random.RandomState(seed % 2**32).shuffle(order)
    held = int(share * count)
    return torch.from_numpy(order[:held]), torch.from_numpy(order[held:])


def normal(shape: Sequence[int], mean: float | Sequence[float], std: float | Sequence[float]) -> View:
    """The view of images as they lie, normalised by one number or one per channel."""
    channels = shape[0] if len(shape) == 3 else 1
    table = []
    for name, value in (("mean", mean), ("std", std)):
        row = torch.as_tensor(value, dtype=torch.float32).reshape(1, -1)
        if row.shape[1] not in (1, channels):
            raise ValueError(f"{name} must be one number or {channels}, one per channel, not {value!r}")
        table.append(row.expand(1, channels).contiguous())
    if not table[0].isfinite().all():
        raise ValueError(f"mean must be finite, not {mean!r}")
    if not (table[1] > 0).all():
        raise ValueError(f"std must be greater than 0, not {std!r}")
    return View(tuple(shape), *table)


def store(what: str, x: Any, y: Any) -> tuple[Tensor, Tensor]:
    """Images as (n, channels, height, width), vectors as (n, features), labels as int64; or an error."""
    x, y = as_tensor(f"{what}: images must be numbers", x), as_tensor(f"{what}: labels must be whole numbers", y)
    if x.dim() and y.dim() and (len(x) != len(y) or y.dim() != 1):
        raise ValueError(f"{what}: {len(x)} images, but labels of shape {tuple(y.shape)}; one label per image is needed")
    if not x.dim() or not y.dim():
        raise ValueError(f"{what}: images of shape {tuple(x.shape)} and labels of shape {tuple(y.shape)}")
    if not len(x):
        raise ValueError(f"{what}: there are no images")
    if x.dim() == 3:
        x = x[:, None]
    elif x.dim() == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
        x = x.permute(0, 3, 1, 2).contiguous()
    elif x.dim() not in (2, 4):
        raise ValueError(f"{what}: images must have 2 to 4 dimensions, not {x.dim()}")
    if x.dtype != torch.uint8:
        x = x.float()
        if not x.isfinite().all():
            raise ValueError(f"{what}: NaN or infinite values in {int((~x.isfinite()).flatten(1).any(1).sum())} images")
    if y.is_floating_point() and not (whole := y.isfinite() & (y == y.round())).all():
        raise ValueError(f"{what}: labels must be whole numbers, not {y[~whole][0].item()}")
    return x, y.long()


def as_tensor(what: str, values: Any) -> Tensor:
    """Without a copy where that is possible: torch can't share arrays that are read-only."""
    if isinstance(values, np.ndarray) and not values.flags.writeable:
        values = values.copy()
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} ({error})") from None


def check_labels(what: str, y: Tensor, classes: int, *, every: bool) -> None:
    """Labels lie within the classes, and (where asked for) every class has an example."""
    if int(y.min()) < 0 or int(y.max()) >= classes:
        wrong = int(y.max()) if int(y.max()) >= classes else int(y.min())
        raise ValueError(f"{what}: label {wrong} is outside the {classes} classes 0 to {classes - 1}")
    counts = torch.bincount(y, minlength=classes)
    if every and not counts.all():
        raise ValueError(f"{what}: class {int(counts.argmin())} of {classes} has no example")


def move(tasks: Sequence[Task], device: torch.device | str) -> list[Task]:
    """The tasks on a device; images that they share stay shared."""
    memo: dict[Place, Tensor] = {}

    def to(t: Tensor) -> Tensor:
        key = place(t)
        if key not in memo:
            memo[key] = t.to(device)
        return memo[key]

    def split(s: Split) -> Split:
        view = replace(
            s.view,
            mean=s.view.mean.to(device),
            std=s.view.std.to(device),
            pixels=None if s.view.pixels is None else to(s.view.pixels),
        )
        task = s.task.to(device) if isinstance(s.task, Tensor) else s.task
        return Split(to(s.x), s.y.to(device), task, view, s.rows.to(device))

    return [replace(t, train=split(t.train), valid=split(t.valid), test=split(t.test)) for t in tasks]
