"""Items of the user's data sets: pairs, dicts and longer tuples as an input and a label, each item with seeds of its own."""

import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from hatrack.options import shown
from hatrack.seeds import derive
from hatrack.tasks.arrays import as_tensor

EXACT = 2**24  # whole numbers up to it are float32 without a loss
FEW = 8  # images that are read twice, to see whether they are random
Key = str | int | tuple[str | int, ...] | None  # where in an item something is; a tuple names several tensors


@contextmanager
def keep_generators() -> Iterator[None]:
    """Restore the states of the generators of torch (on the CPU), NumPy and Python after the block."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def seed_generators(seed: int) -> None:
    """Seed the global generators from which random transforms draw: those of torch (on the CPU), NumPy and Python."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@dataclass(frozen=True)
class Items:
    """The items of a data set.

    Attributes:
        what: names the data in errors.
        data: the data set, with a length and items by number.
        input: where in an item the input is: a key of a dict or a place in a tuple; None: items are (input, label) pairs.
        label: where the label is.
        whole: whether labels are whole numbers.
        collate: turns a list of items into a batch; None: inputs are stacked.
    """

    what: str
    data: Any
    input: Key = None
    label: Key = None
    whole: bool = True
    collate: Callable[[list[Any]], Any] | None = None

    def __post_init__(self) -> None:
        data = self.data
        if isinstance(data, DataLoader):
            raise ValueError(
                f"{self.what}: a DataLoader is given to Task.from_loaders(index, name, train, valid, test); a data set is "
                "needed here, such as its .dataset"
            )
        if isinstance(data, IterableDataset) or not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise ValueError(f"{self.what}: a data set with a length and (image, label) pairs is needed, not {shown(data)}")
        if (self.input is None) != (self.label is None):
            raise ValueError(f"{self.what}: input={self.input!r} and label={self.label!r}: give both or none")
        if not len(data):
            raise ValueError(f"{self.what}: there are no images")

    def __len__(self) -> int:
        return len(self.data)

    def read(self, numbers: Sequence[int], seed: int | None = None) -> tuple[Tensor, Tensor]:
        """Read items.

        Args:
            numbers: which ones.
            seed: seeds the random transforms of each item, together with its number; None leaves the generators alone.

        Returns:
            The inputs, stacked as they are, and the labels.

        Raises:
            ValueError: if an item can't be read, or is no input with a label.
        """
        if self.collate is not None:
            return self._collated([self._item(number, seed) for number in numbers], numbers)
        inputs, labels = [], []
        for number in numbers:
            image, label = self._pair(self._item(number, seed), number)
            inputs.append(one := self._input(image))
            labels.append(label)
            if one.shape != inputs[0].shape:
                raise ValueError(
                    f"{self.what}: image {number} is of shape {tuple(one.shape)}, the first of {tuple(inputs[0].shape)}; "
                    "all must be of one size (a Resize in the data set's transform makes them so)"
                )
            if one.dtype != inputs[0].dtype and {one.dtype, inputs[0].dtype} & {torch.uint8, torch.bool}:  # other units
                raise ValueError(f"{self.what}: image {number} is of type {one.dtype}, the first of {inputs[0].dtype}")
        return torch.stack(inputs), self._stacked(labels)

    def _item(self, number: int, seed: int | None) -> Any:
        """Return an item as the data set has it."""
        if seed is not None:
            seed_generators(derive(seed, number))
        try:
            return self.data[number]
        except Exception as error:
            raise ValueError(f"{self.what}: item {number} can't be read: {_in_a_line(error)}") from error

    def read_once(self) -> tuple[Tensor, Tensor]:
        """Read all items; warn if they would be others the next time."""
        x, y = self.read(range(len(self)))
        if not torch.equal(x[:FEW], self.read(range(len(x[:FEW])))[0]):
            warnings.warn(
                f"{self.what}: images differ from read to read, as after random transforms; what these drew now stays, and "
                "stream=True draws anew in every epoch",
                stacklevel=3,
            )
        return x, y

    def labels(self) -> Tensor | None:
        """Return all labels if the data set tells them by its attribute `targets`, as those of torchvision do."""
        found = None if self.collate else getattr(self.data, "targets", None)
        if not isinstance(found, Sequence | np.ndarray | Tensor) or len(found) != len(self) or isinstance(found, str):
            return None
        try:
            return self._stacked(list(found))
        except (ValueError, TypeError, RuntimeError):
            return None

    def _pair(self, item: Any, number: int) -> tuple[Any, Any]:
        """Return the input and the label of an item."""
        if self.input is not None and self.label is not None:
            return _at(self.what, item, self.input), _at(self.what, item, self.label)
        if isinstance(item, Mapping):
            raise ValueError(
                f"{self.what}: item {number} is a dict with {', '.join(map(repr, item))}: say which are the input and the "
                "label, such as input='image', label='label'"
            )
        if isinstance(item, Sequence) and len(item) > 2:
            raise ValueError(
                f"{self.what}: item {number} has {len(item)} parts: say which are the input and the label, such as input=0, "
                "label=1"
            )
        try:
            image, label = item
        except (TypeError, ValueError):
            raise ValueError(f"{self.what}: item {number} must be an (image, label) pair, not {shown(item)}") from None
        return image, label

    def _input(self, image: Any) -> Tensor:
        """Return one input as a tensor."""
        if isinstance(image, Mapping):
            raise ValueError(
                f"{self.what}: an input is a dict of {', '.join(map(repr, image))}, and trunks take one tensor: name those "
                "to be joined, such as input=('ids', 'mask'), or let the data set return one tensor"
            )
        return as_tensor(f"{self.what}: images must be numbers", image if isinstance(image, Tensor) else np.array(image))

    def _stacked(self, labels: list[Any]) -> Tensor:
        """Return labels as one tensor."""
        if self.whole:
            return torch.tensor([_whole_label(self.what, label) for label in labels])
        try:
            return torch.stack([as_tensor(f"{self.what}: labels must be numbers", label) for label in labels])
        except RuntimeError:
            raise ValueError(f"{self.what}: labels must all be of one shape") from None

    def _collated(self, items: list[Any], numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the inputs and labels of a batch that the user's function made."""
        assert self.collate is not None
        try:
            batch = self.collate(items)
        except Exception as error:
            raise ValueError(f"{self.what}: collate_fn can't join items: {_in_a_line(error)}") from error
        image, label = self._pair(batch, numbers[0])
        x, y = self._input(image), as_tensor(f"{self.what}: labels must be numbers", label)
        if not x.dim() or not y.dim() or not len(x) == len(y) == len(items):
            raise ValueError(f"{self.what}: collate_fn made {tuple(x.shape)} and {tuple(y.shape)} of {len(items)} items")
        return x, y


def _at(what: str, item: Any, key: Key) -> Any:
    """Return a part of an item; several parts are joined into one vector."""
    if isinstance(key, tuple):
        parts = [as_tensor(f"{what}: {one!r} must be numbers", _at(what, item, one)).reshape(-1) for one in key]
        if not any(part.is_floating_point() for part in parts):
            return torch.cat(parts)
        if any(not part.is_floating_point() and part.abs().max() > EXACT for part in parts):
            raise ValueError(f"{what}: whole numbers above {EXACT:,} beside floats would lose their last digits")
        return torch.cat([part.float() for part in parts])
    try:
        return item[key]
    except (KeyError, IndexError, TypeError):
        known = f"a dict with {', '.join(map(repr, item))}" if isinstance(item, Mapping) else shown(item)
        raise ValueError(f"{what}: an item has no {key!r}: it is {known}") from None


def _in_a_line(error: Exception) -> str:
    """Return an error's type and the first line of its text."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}{f': {said[0]}' if said else ''}"


def _whole_label(what: str, label: Any) -> int:
    """Return a label as a whole number; raise an error if it is none."""
    try:
        whole = int(label)
        if isinstance(label, str) or whole == label:
            return whole
    except (TypeError, ValueError, RuntimeError):
        pass
    raise ValueError(f"{what}: labels must be whole numbers, not {label!r}")
