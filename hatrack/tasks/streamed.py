"""Streamed data of a task: what is checked when it is made, and how items become the images of its splits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from hatrack.options import shown
from hatrack.tasks.arrays import Number, check_plain, hold_out, in_units, normalisation, to_inputs
from hatrack.tasks.items import Items, Key
from hatrack.tasks.labels import labelled
from hatrack.tasks.split import Split
from hatrack.tasks.stream import PIECE, Stream
from hatrack.tasks.targets import Compare, Kind


@dataclass(frozen=True, eq=False)
class InputReader:
    """Reads the inputs of items in one form, and checks that they are still what they were when the task was made.

    Attributes:
        items: the items.
        tokens: the inputs are token ids.
        images: the inputs are images, which are brought to channels first.
        like: no input, of the shape and type that all must have; None: any.
        labels: all labels, as they were; None: any.
    """

    items: Items
    tokens: bool
    images: bool
    like: Tensor | None = None
    labels: Tensor | None = None

    def __call__(self, rows: Tensor, seed: int) -> Tensor:
        x, y = (t.cpu() for t in self.items.read(rows.tolist(), seed))
        x = to_inputs(self.items.what, x, y, tokens=self.tokens, images=self.images)
        if self.like is not None and (x.shape[1:] != self.like.shape[1:] or x.dtype != self.like.dtype):
            raise ValueError(
                f"{self.items.what}: items {int(rows.min())} to {int(rows.max())} are {x.dtype} of shape "
                f"{tuple(x.shape[1:])}, the first ones {self.like.dtype} of shape {tuple(self.like.shape[1:])}"
            )
        if self.labels is not None and not torch.equal(y, before := self.labels[rows]):
            at = int((y != before).reshape(len(y), -1).any(1).nonzero()[0]) if y.shape == before.shape else 0
            raise ValueError(
                f"{self.items.what}: the label of item {int(rows[at])} is {shown(y[at].tolist())}, but it was "
                f"{shown(before[at].tolist())} before; labels must stay as they are"
            )
        return x


@dataclass(frozen=True, eq=False)
class LabelReader:
    """Reads the labels of items in the place of images, so that one pass over a data set finds them all."""

    items: Items

    def __call__(self, rows: Tensor, seed: int) -> Tensor:
        return self.items.read(rows.tolist(), seed)[1].cpu()


@dataclass(frozen=True, eq=False)
class Part:
    """The data of a task for training, validation or test, and how they are read.

    Attributes:
        items: the items.
        workers: how many processes read them.
        options: further arguments of the DataLoader.
    """

    items: Items
    workers: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def labels(self) -> Tensor:
        """Return all labels: those that the data set tells, or by one pass over it."""
        known = self.items.labels()
        if known is not None:
            return known
        rows = torch.split(torch.arange(len(self.items)), PIECE)
        return torch.cat(list(Stream(LabelReader(self.items), self.workers, self.options).read_all(rows)))

    def stream(self, reader: InputReader) -> Stream:
        """Return the stream that reads all of it."""
        return Stream(reader, self.workers, self.options)


def part_of_loader(what: str, loader: Any, *, input: Key, label: Key, whole: bool) -> Part:
    """Return what a user's DataLoader reads: its data set, its workers, and how items are joined.

    The order of items and the size of batches are left to the seed and the regime.
    """
    if not isinstance(loader, DataLoader):
        raise ValueError(f"{what}: a torch DataLoader is needed, not {shown(loader)}; Task.from_dataset takes data sets")
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            f"{what}: an IterableDataset has no items by number, so that no seed can fix their order; a data set with "
            "__len__ and __getitem__ is needed"
        )
    sampler = loader.sampler
    plain = type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement)
    if not plain or type(loader.batch_sampler) is not BatchSampler:
        other = sampler if not plain else loader.batch_sampler
        raise ValueError(
            f"{what}: the seed and the regime decide the order and the size of batches, so that the loader's "
            f"{type(other).__name__} would have no effect; class_weights let rare classes count more"
        )
    collate = None if loader.collate_fn is default_collate else loader.collate_fn
    names = ("worker_init_fn", "multiprocessing_context", "prefetch_factor", "timeout")
    options = {name: value for name in names if loader.num_workers and (value := getattr(loader, name))}
    return Part(Items(what, loader.dataset, input, label, whole, collate), loader.num_workers, options)


class Splits(NamedTuple):
    """The splits of a streamed task, and how many outputs its head has."""

    outputs: int
    train: Split
    valid: Split
    test: Split


def make_splits(
    index: int,
    what: str,
    train: Part,
    test: Part,
    valid: Part | float = 0.15,
    *,
    classes: int | None = None,
    seed: int = 0,
    mean: Number = 0.0,
    std: Number = 1.0,
    scale: float | None = None,
    tokens: bool = False,
    images: bool = True,
    target: Kind = "classes",
    class_weights: Any = None,
    loss: Compare | None = None,
    score: Compare | None = None,
) -> Splits:
    """Make the splits of a streamed task.

    The labels of all items and the inputs of the first ones are read. The arguments after the data are those of
    `Task.from_arrays`; `valid` is the share to be held out, or data for validation.
    """
    parts = [train, test, *([valid] if isinstance(valid, Part) else [])]
    found = [part.stream(InputReader(part.items, tokens, images)).read(_first_rows(part)) for part in parts]
    for part, x in zip(parts, found, strict=True):
        if x.shape[1:] != found[0].shape[1:] or x.dtype != found[0].dtype:
            raise ValueError(
                f"{part.items.what}: inputs are {x.dtype} of shape {tuple(x.shape[1:])}, training inputs {found[0].dtype} "
                f"of shape {tuple(found[0].shape[1:])}"
            )
    scale = check_plain(what, mean, std, scale) if tokens else in_units(what, found[0], found[1], mean, std, scale)[2]
    labels = [part.labels() for part in parts]
    given = {"classes": classes, "class_weights": class_weights, "loss": loss, "score": score}
    asked = [labelled(what, labels[0], other, kind=target, **given) for other in labels[1:]]
    ys, transform = [asked[0].train, *(one.test for one in asked)], normalisation(found[0].shape[1:], mean, std, scale)
    splits = []
    for part, x, before, y in zip(parts, found, labels, ys, strict=True):
        reader = InputReader(part.items, tokens, images, x[:0], before)
        store = torch.empty((len(y), *x.shape[1:]), dtype=x.dtype, device="meta")  # a shape and a type, no data
        rows = torch.arange(len(y))
        splits.append(
            Split(store, y, index, transform, rows, on_host=True, target=asked[0].target, stream=part.stream(reader))
        )
    if isinstance(valid, Part):
        return Splits(asked[0].outputs, splits[0], splits[2], splits[1])
    held, rest = hold_out(len(splits[0]), valid, seed)
    return Splits(asked[0].outputs, splits[0].part(rest), splits[0].part(held), splits[1])


def _first_rows(part: Part) -> Tensor:
    """Return the rows that are looked at when a task is made."""
    return torch.arange(min(PIECE, len(part.items)))
