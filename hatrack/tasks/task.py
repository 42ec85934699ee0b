"""What is learned: a Task (train, validation, test) made of a benchmark's data or of one's own arrays, all checked."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hatrack.tasks.arrays import check_labels, check_units, hold_out, normalisation, to_tensors
from hatrack.tasks.split import Split
from hatrack.tasks.transform import Transform


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
        return self.train.transform.shape

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
        train = to_tensors(f"task {name!r}, training", x_train, y_train)
        test = to_tensors(f"task {name!r}, test", x_test, y_test)
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
        return cls.build(
            index, name, classes, train, test, normalisation(train[0].shape[1:], mean, std), valid=valid, seed=seed
        )

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
        transform: Transform,
        *,
        valid: float,
        seed: int,
        keep: tuple[Tensor, Tensor] | None = None,
    ) -> Self:
        """From stored images, of which `keep` names the rows for training and test. Nothing is checked or copied."""
        rows = keep or (torch.arange(len(train[0])), torch.arange(len(test[0])))
        whole = Split(train[0], train[1], index, transform, rows[0])
        held, rest = hold_out(len(whole), valid, seed)
        return cls(
            index, name, classes, whole.part(rest), whole.part(held), Split(test[0], test[1], index, transform, rows[1])
        )


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
