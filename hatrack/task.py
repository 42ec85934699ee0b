"""What is learned: a Task (train, validation, test) made of a benchmark's data or of one's own arrays, all checked."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hatrack.split import Batch, Place, Split, TaskId, View, place

__all__ = ["Batch", "Split", "Task", "TaskId", "View", "check_labels", "move", "normal", "store"]

UNITS = 2.0  # floats beyond it are not in the units of bytes that are scaled to 0 to 1


@dataclass(frozen=True)
class Task:
    """One thing to learn: its number in the sequence, its classes, and its data."""

    index: int
    name: str
    classes: int
    train: Split
    valid: Split
    test: Split

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):  # a saved method would hold a name that can't be read again
            raise ValueError(f"the name of a task is text, not {self.name!r}")

    def __repr__(self) -> str:
        sizes = f"{len(self.train)} + {len(self.valid)} + {len(self.test)} images of {self.shape}"
        return f"Task({self.index}, {self.name!r}, {self.classes} classes, {sizes})"

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
        if index < 0:
            raise ValueError(f"the number of a task counts from 0, not {index}")
        train = store(f"task {name!r}, training", x_train, y_train)
        test = store(f"task {name!r}, test", x_test, y_test)
        if train[0].shape[1:] != test[0].shape[1:]:
            raise ValueError(
                f"task {name!r}: training images are {tuple(train[0].shape[1:])}, test images {tuple(test[0].shape[1:])}"
            )
        check_units(f"task {name!r}", train[0], test[0], mean)
        try:
            classes = int(train[1].max()) + 1 if classes is None else operator.index(classes)
        except TypeError:
            raise ValueError(f"task {name!r}: classes must be a whole number, not {classes!r}") from None
        for part, (_, y) in (("training", train), ("test", test)):
            check_labels(f"task {name!r}, {part}", y, classes, every=part == "training")
        return cls.build(index, name, classes, train, test, normal(train[0].shape[1:], mean, std), valid=valid, seed=seed)

    @classmethod
    def from_dataset(cls, index: int, name: str, train: Dataset[Any], test: Dataset[Any], **how: Any) -> Self:
        """A task of any two `torch.utils.data.Dataset`s of (image, label) pairs; `how` as in `from_arrays`.

        Images may be tensors, arrays or PIL images, all of one size. They are read once and kept as they are.
        """
        parts = [_items(f"task {name!r}, {part}", data) for part, data in (("training", train), ("test", test))]
        return cls.from_arrays(index, name, *parts[0], *parts[1], **how)

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


def _items(what: str, data: Any) -> tuple[Tensor, Tensor]:
    """All images and labels of a data set."""
    images, labels = [], []
    for number in range(len(data)):
        image, label = data[number]
        images.append(image if isinstance(image, Tensor) else torch.from_numpy(np.array(image)))
        labels.append(_label(what, label))
        if images[-1].shape != images[0].shape:
            raise ValueError(
                f"{what}: image {number} is of shape {tuple(images[-1].shape)}, the first of {tuple(images[0].shape)}; "
                "all must be of one size (a Resize in the data set's transform makes them so)"
            )
    if not images:
        raise ValueError(f"{what}: there are no images")
    return torch.stack(images), torch.tensor(labels)


def _label(what: str, label: Any) -> int:
    try:
        whole = int(label)
        if isinstance(label, str) or whole == label:
            return whole
    except (TypeError, ValueError, RuntimeError):
        pass
    raise ValueError(f"{what}: labels must be whole numbers, not {label!r}")


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
    x = channels_first(what, x)
    if x.is_complex() or not x[0].numel():
        raise ValueError(f"{what}: images must be real numbers, not {x.dtype} of shape {tuple(x.shape[1:])}")
    if x.dtype != torch.uint8:
        x = x.float()
        if not x.isfinite().all():
            raise ValueError(f"{what}: NaN or infinite values in {int((~x.isfinite()).flatten(1).any(1).sum())} images")
    if y.is_floating_point() and not (whole := y.isfinite() & (y == y.round())).all():
        raise ValueError(f"{what}: labels must be whole numbers, not {y[~whole][0].item()}")
    return x, y.long()


def channels_first(what: str, x: Tensor) -> Tensor:
    """Gray images (n, height, width) and colour images (n, height, width, 3 or 1) as (n, channels, height, width)."""
    if x.dim() == 3:
        return x[:, None]
    if x.dim() == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
        return x.permute(0, 3, 1, 2).contiguous()
    if x.dim() not in (2, 4):
        raise ValueError(f"{what}: images must have 2 to 4 dimensions, not {x.dim()}")
    return x


def as_tensor(what: str, values: Any) -> Tensor:
    """Without a copy where that is possible: torch can't share arrays that are read-only."""
    if isinstance(values, np.ndarray) and not values.flags.writeable:
        values = values.copy()
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{what} ({error})") from None


def check_units(what: str, train: Tensor, test: Tensor, mean: float | Sequence[float]) -> None:
    """Bytes are scaled to 0 to 1 and floats are not: an error if they can't be in the same units."""
    floats = [x for x in (train, test) if x.dtype != torch.uint8]
    if len(floats) == 1 and floats[0].abs().max() > UNITS:
        raise ValueError(
            f"{what}: bytes (uint8) are scaled to 0 to 1, but of the training and test images one are floats up to "
            f"{floats[0].abs().max().item():g}; give both as bytes or both as floats"
        )
    if len(floats) < 2 and torch.as_tensor(mean).max() > 1:
        raise ValueError(f"{what}: bytes (uint8) are scaled to 0 to 1, and mean and std are in these units, not {mean!r}")


def check_labels(what: str, y: Tensor, classes: int, *, every: bool) -> None:
    """Labels lie within the classes, and (where asked for) every class has an example."""
    if int(y.min()) < 0 or int(y.max()) >= classes:
        wrong = int(y.max()) if int(y.max()) >= classes else int(y.min())
        raise ValueError(f"{what}: label {wrong} is outside the {classes} classes 0 to {classes - 1}")
    # In order. A count of every class would take memory for as many as are claimed.
    there: Tensor = y.unique()  # type: ignore[no-untyped-call]
    if every and len(there) < classes:
        gap = (there != torch.arange(len(there), device=y.device)).nonzero()
        missing = int(gap[0]) if len(gap) else len(there)
        raise ValueError(f"{what}: class {missing} of {classes} has no example (classes are counted from 0)")


def move(tasks: Sequence[Task], device: torch.device | str, *, room: int | None = None) -> list[Task]:
    """The tasks on a device; images that they share stay shared.

    If the images take more than `room` bytes (by default half of the memory that a GPU has free), they stay in the host's
    memory and are fetched ahead while training.
    """
    device = torch.device(device)
    if room is None and device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[0] // 2
    stores = {place(s.x): s.x for t in tasks for s in (t.train, t.valid, t.test)}
    staged = room is not None and sum(x.nbytes for x in stores.values()) > room
    memo: dict[Place, Tensor] = {}

    def to(t: Tensor) -> Tensor:
        key = place(t)
        if key not in memo:
            memo[key] = t.to(device)
        return memo[key]

    def split(s: Split) -> Split:
        pixels = None if s.view.pixels is None else to(s.view.pixels)
        return replace(
            s,
            x=s.x if staged else to(s.x),
            y=s.y.to(device),
            task=s.task.to(device) if isinstance(s.task, Tensor) else s.task,
            view=replace(s.view, mean=s.view.mean.to(device), std=s.view.std.to(device), pixels=pixels),
            rows=s.rows.to(device),
            staged=staged,
        )

    return [replace(t, train=split(t.train), valid=split(t.valid), test=split(t.test)) for t in tasks]
