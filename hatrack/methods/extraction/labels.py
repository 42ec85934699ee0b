"""Which slices of which tensors can only be cut together.

Every channel of every value in a graph has a label. Operations that combine two values channel by channel, such as a sum,
join the labels of both. What an operation does not let one cut is pinned.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, fx

UNKNOWN = float("nan")


class Channels(NamedTuple):
    """The channels of a value in a graph.

    Attributes:
        dim: the dimension of the value that holds the channels.
        labels: (channels,), int64.
        values: (channels,), float64: the value of a channel that is the same everywhere and for all images, 0 for a closed
            one; not a number (NaN) for the others.
    """

    dim: int
    labels: Tensor
    values: Tensor

    def known(self) -> Tensor:
        """Return which channels have one value everywhere."""
        return ~self.values.isnan()


class Labels:
    """Groups of labels that are cut together or not at all (a union-find structure)."""

    def __init__(self) -> None:
        self.parents: list[int] = []
        self.pinned: set[int] = set()

    def new(self, count: int) -> Tensor:
        """Return so many new labels."""
        first = len(self.parents)
        self.parents.extend(range(first, first + count))
        return torch.arange(first, first + count)

    def root(self, label: int) -> int:
        """Return the label that stands for a group."""
        while self.parents[label] != label:
            self.parents[label] = self.parents[self.parents[label]]
            label = self.parents[label]
        return label

    def roots(self, labels: Tensor) -> Tensor:
        """Return the labels that stand for the groups of several."""
        return torch.tensor([self.root(label) for label in labels.tolist()], dtype=torch.int64)

    def join(self, first: Tensor, second: Tensor) -> None:
        """Join labels pair by pair."""
        for a, b in zip(first.tolist(), second.tolist(), strict=True):
            self.parents[self.root(a)] = self.root(b)

    def pin(self, labels: Tensor) -> None:
        """Note that these are not to be cut."""
        self.pinned.update(labels.tolist())

    def is_pinned(self, roots: Iterable[int]) -> Tensor:
        """Return which of these groups are not to be cut."""
        pinned = {self.root(label) for label in self.pinned}
        return torch.tensor([root in pinned for root in roots], dtype=torch.bool)


class Read(NamedTuple):
    """A layer that adds up channels: y = sum over k of weight[:, k] x[k].

    Attributes:
        node: the operation.
        channels: those of its input.
        matrix: (rows, channels): the sum of the absolute weights between each pair.
        sums: (rows, channels): the sum of these weights, with which a constant channel enters the bias.
        rows: (rows,), the labels of its results.
        foldable: whether a constant other than 0 is the same in all places of the result; not if it is padded.
    """

    node: fx.Node
    channels: Channels
    matrix: Tensor
    sums: Tensor
    rows: Tensor
    foldable: bool

    def passes(self, removed_rows: Tensor) -> Tensor:
        """Return which channels of the input may be left out, if these rows are."""
        values = self.channels.values
        known = ~values.isnan() if self.foldable else values == 0
        return known | (self.matrix[~removed_rows] == 0).all(0)
