"""A Task: training, validation and test data, of a benchmark or of a user's own arrays, all checked."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hatrack.options import shown, whole
from hatrack.tasks.arrays import check_plain, hold_out, in_units, normalisation, to_inputs
from hatrack.tasks.items import Items, Key
from hatrack.tasks.labels import labelled
from hatrack.tasks.split import Split, shape_text
from hatrack.tasks.streamed import Part, make_splits, part_of_loader
from hatrack.tasks.targets import CLASSES, Compare, Kind, Target
from hatrack.tasks.transform import Transform


@dataclass(frozen=True, repr=False)
class Task:
    """One task of a sequence: its number, its classes and its data. `from_arrays`, `from_dataset` and `from_loaders` make
    one.

    Attributes:
        index: the number of the task in the sequence, from 0.
        name: its name.
        classes: how many classes it has; of another target, how many outputs.
        train: the data to train on.
        valid: the data held out of the training set for validation; it may be empty.
        test: the data to test on.
        first: the label of its first class; 0, unless labels are counted on from task to task: see `in_scenario`.

    `dataclasses.replace(task, index=3)` is the same task with another number.

    Example:
        >>> task = hr.Task.from_arrays(0, "digits", x_train, y_train, x_test, y_test)
        >>> task
        Task(0, 'digits', 10 classes, images 1x28x28: 170 for training, 30 for validation, 50 for test)
        >>> task.shape
        (1, 28, 28)
    """

    index: int
    name: str
    classes: int
    train: Split
    valid: Split
    test: Split
    first: int = 0

    def __new__(cls, *given: Any, **named: Any) -> Self:
        if given and isinstance(given[0], DataLoader | Dataset):
            raise ValueError(
                "a Task is made of loaders by Task.from_loaders(index, name, train, valid, test), of data sets by "
                "Task.from_dataset(index, name, train, test)"
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():  # a saved method would hold a name that can't be read
            raise ValueError(f"the name of a task is text, not {self.name!r}")
        for part in ("train", "valid", "test"):  # a task that `replace` gave another number trains the head of that number
            split = getattr(self, part)
            if isinstance(split.task, int) and split.task != self.index:
                object.__setattr__(self, part, replace(split, task=self.index))

    def __repr__(self) -> str:
        sizes = f"{len(self.train)} for training, {len(self.valid)} for validation, {len(self.test)} for test"
        asked = f"{self.classes} classes" if self.target.kind == "classes" else f"{self.target.kind}, {self.classes} outputs"
        return f"Task({self.index}, {self.name!r}, {asked}, {shape_text(self.shape)}: {sizes})"

    @property
    def target(self) -> Target:
        """What the task asks the network for."""
        return self.train.target

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one image as the network sees it."""
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
        scale: float | None = None,
        tokens: bool = False,
        images: bool = True,
        target: Kind = "classes",
        class_weights: Any = None,
        loss: Compare | None = None,
        score: Compare | None = None,
    ) -> Self:
        """Make a task of arrays or tensors.

        The network sees (image / scale - mean) / std. Images of type uint8 are bytes: they are divided by 255. Others are
        taken as they are, so that they should be scaled to [0, 1] or standardised already. Images or vectors that have no
        negative value and a maximum above 2 look like bytes that nobody scaled, on which networks learn badly. They are
        refused unless their scale is stated: by `scale`, or by a `mean` or `std` above 1, which can only be in their units.

        Args:
            index: the number of the task in the sequence, from 0.
            name: its name.
            x_train: training images (n, height, width), (n, height, width, channels) or (n, channels, height, width), or
                vectors (n, features).
            y_train: their labels, whole numbers from 0.
            x_test: test images of the same shape.
            y_test: their labels.
            classes: how many classes there are; by default one more than the largest training label.
            valid: the share of the training images that is held out for validation, from 0 to below 1.
            seed: decides which images are held out.
            mean: what is subtracted after scaling, one number or one per channel.
            std: what is divided by after that, one number or one per channel.
            scale: what images that are not uint8 are divided by: 255 for floats up to 255, 1 for images that are to be
                taken as they are. `Method.predict` later takes images in the same units as these.
            tokens: the inputs are token ids (n, length), whole numbers from 0, which reach the trunk as they are (int64).
            images: False for inputs of any other shape (n, ...), such as sequences or video, which reach the trunk in this
                shape; otherwise three dimensions are those of gray images, and colours at the end are brought to the front.
            target: what the labels are: "classes"; "multi-label", zeros and ones (n, labels); "regression", numbers (n,) or
                (n, numbers); "ordinal", grades in order, whole numbers from 0.
            class_weights: how much the examples of each class count in the loss: a number per class, or "balanced".
            loss: a loss of your own, from outputs (n, classes) and labels to the mean or to a number per example. Then
                labels may be any numbers, and `classes` is the number of outputs.
            score: beside such a loss, a score of your own that is reported in place of the accuracy; larger is better.

        Returns:
            The task. Arrays are not copied where that is possible.

        Raises:
            ValueError: if arrays, labels, units or another argument do not fit together.

        Example:
            >>> task = hr.Task.from_arrays(0, "digits", x_train, y_train, x_test, y_test, mean=0.13, std=0.31)
            >>> floats = x_train.astype("float32"), y_train, x_test.astype("float32"), y_test  # from 0 to 255
            >>> same = hr.Task.from_arrays(0, "digits", *floats, mean=0.13, std=0.31, scale=255)
        """
        index, seed = _number(index), whole("seed", seed)
        what, valid = f"task {name!r}", _share(valid)
        train = to_inputs(f"{what}, training", x_train, y_train, tokens=tokens, images=images)
        test = to_inputs(f"{what}, test", x_test, y_test, tokens=tokens, images=images)
        if train.shape[1:] != test.shape[1:]:
            raise ValueError(f"{what}: training images are {tuple(train.shape[1:])}, test images {tuple(test.shape[1:])}")
        if tokens:
            scale = check_plain(what, mean, std, scale)
        else:
            train, test, scale = in_units(what, train, test, mean, std, scale)
        asked = labelled(
            what, y_train, y_test, kind=target, classes=classes, class_weights=class_weights, loss=loss, score=score
        )
        parts, transform = ((train, asked.train), (test, asked.test)), normalisation(train.shape[1:], mean, std, scale)
        return cls.build(index, name, asked.outputs, *parts, transform, valid=valid, seed=seed, target=asked.target)

    @classmethod
    def from_dataset(
        cls,
        index: int,
        name: str,
        train: Dataset[Any],
        test: Dataset[Any],
        *,
        input: Key = None,
        label: Key = None,
        stream: bool = False,
        workers: int = 0,
        **how: Any,
    ) -> Self:
        """Make a task of any two `torch.utils.data.Dataset`s of (image, label) pairs.

        Args:
            index: the number of the task in the sequence, from 0.
            name: its name.
            train: the training set. Images may be tensors, arrays or PIL images, all of one size.
            test: the test set.
            input: where in an item the input is, if items are no pairs: a key of a dict or a place in a tuple. Of several,
                such as ("ids", "mask"), the numbers are joined into one vector, which the trunk takes apart.
            label: where in an item the label is.
            stream: read images whenever they are needed, so that they need not fit in memory and random transforms are drawn
                anew in every epoch. Otherwise all are read once, and what their transforms drew stays.
            workers: how many processes read streamed images; 0 reads them in this one.
            how: `classes`, `valid`, `target` and all other options of `from_arrays`.

        Returns:
            The task.

        Example:
            >>> pairs = torch.utils.data.TensorDataset(torch.rand(20, 1, 8, 8), torch.arange(20) % 2)
            >>> hr.Task.from_dataset(0, "noise", pairs, pairs, valid=0.5)
            Task(0, 'noise', 2 classes, images 1x8x8: 10 for training, 10 for validation, 20 for test)
        """
        workers = whole("workers", workers)
        if workers < 0 or (workers and not stream):
            raise ValueError(f"workers must be a whole number from 0, for stream=True, not {workers}")
        plain = _has_whole_labels(how)
        sets = (("training", train), ("test", test))
        items = [Items(f"task {name!r}, {part}", data, input, label, plain) for part, data in sets]
        if stream:
            return cls._streamed(index, name, *(Part(one, workers) for one in items), **how)
        read = [one.read_once() for one in items]
        return cls.from_arrays(index, name, *read[0], *read[1], **how)

    @classmethod
    def from_loaders(
        cls,
        index: int,
        name: str,
        train: DataLoader[Any],
        valid: DataLoader[Any] | float,
        test: DataLoader[Any],
        *,
        input: Key = None,
        label: Key = None,
        **how: Any,
    ) -> Self:
        """Make a task of torch's DataLoaders, whose images are read anew in every epoch.

        A loader's data set, workers and `collate_fn` are used. The size of batches is that of the regime, and their order
        depends on the seed, the task and the epoch, as for all tasks; so do random transforms that draw from the generators
        of torch, NumPy or Python. All labels are read when the task is made, by a pass over the data unless the data set has
        an attribute `targets`.

        Args:
            index: the number of the task in the sequence, from 0.
            name: its name.
            train: reads the training data.
            valid: reads the validation data; or the share of the training data that is held out for it.
            test: reads the test data.
            input: where in an item the input is, if items are no (input, label) pairs: see `from_dataset`.
            label: where in an item the label is.
            how: `classes`, `target` and all other options of `from_arrays`.

        Returns:
            The task.

        Raises:
            ValueError: if a loader has a sampler or an order of its own, or its items do not fit together.

        Example:
            >>> pairs = torch.utils.data.TensorDataset(torch.rand(20, 1, 8, 8), torch.arange(20) % 2)
            >>> loader = torch.utils.data.DataLoader(pairs, num_workers=0)
            >>> hr.Task.from_loaders(0, "noise", loader, 0.5, loader)
            Task(0, 'noise', 2 classes, images 1x8x8: 10 for training, 10 for validation, 20 for test)
        """
        plain, what = _has_whole_labels(how), f"task {name!r}"
        given = [
            ("training", train),
            ("test", test),
            *([] if isinstance(valid, int | float | np.number) else [("validation", valid)]),
        ]
        parts = [part_of_loader(f"{what}, {part}", one, input=input, label=label, whole=plain) for part, one in given]
        return cls._streamed(index, name, *parts[:2], **{"valid": parts[2] if len(parts) > 2 else valid, **how})

    @classmethod
    def _streamed(
        cls, index: int, name: str, train: Part, test: Part, *, valid: Any = 0.15, seed: int = 0, **how: Any
    ) -> Self:
        valid = valid if isinstance(valid, Part) else _share(valid)
        index, seed = _number(index), whole("seed", seed)
        return cls(index, name, *make_splits(index, f"task {name!r}", train, test, valid, seed=seed, **how))

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
        target: Target = CLASSES,
    ) -> Self:
        """Make a task of stored images, without any check or copy.

        Args:
            index: the number of the task.
            name: its name.
            classes: how many classes it has.
            train: the training images, and a label for each that is used.
            test: the test images, and a label for each that is used.
            transform: what turns the images into what the network sees.
            valid: the share of the training images that is held out for validation.
            seed: decides which images are held out.
            keep: the rows that are used for training and for test; None uses all.
            target: what the labels are.
        """
        rows = keep or (torch.arange(len(train[0])), torch.arange(len(test[0])))
        whole = Split(train[0], train[1], index, transform, rows[0], target=target)
        held, rest = hold_out(len(whole), valid, seed)
        tested = Split(test[0], test[1], index, transform, rows[1], target=target)
        return cls(index, name, classes, whole.part(rest), whole.part(held), tested)


_own = inspect.signature(Task.__init__)
Task.__signature__ = _own.replace(parameters=list(_own.parameters.values())[1:])  # type: ignore[attr-defined] # not __new__'s


def _number(index: Any) -> int:
    """Return the number of a task; raise an error if it is none."""
    number = whole("the number of a task", index)
    if number < 0:
        raise ValueError(f"the number of a task counts from 0, not {number}")
    return number


def _share(valid: Any) -> Any:
    """Return the share that is held out for validation; raise an error if it is none."""
    if isinstance(valid, bool) or not isinstance(valid, int | float | np.number) or not 0 <= valid < 1:
        raise ValueError(f"valid must be a share from 0 to below 1, not {shown(valid)}")
    return valid


def _has_whole_labels(how: dict[str, Any]) -> bool:
    """Return whether options of `from_arrays` ask for labels that are whole numbers."""
    return how.get("target", "classes") not in ("multi-label", "regression") and how.get("loss") is None


def with_crops(task: Task) -> Task:
    """Return a task whose training images are randomly cropped and flipped; raise an error if it has no images."""
    if len(task.shape) != 3 or task.train.x.dtype == torch.int64:
        raise ValueError(f"augment='crop-flip' is for images; task {task.name!r} has inputs of shape {task.shape}")
    return replace(task, train=replace(task.train, augment=True))
