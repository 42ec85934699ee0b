"""Tensors with more rows than they have, so that steps whose tensors have other numbers of rows have one form."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Padding:
    """A tensor that gets more rows in a compiled or stacked step than it has.

    Attributes:
        tensor: the tensor.
        rows: how many rows it gets.
        fill: the value of those beyond its own.
    """

    tensor: Tensor
    rows: int
    fill: float


@contextmanager
def padded(paddings: Sequence[Padding]) -> Iterator[list[Tensor]]:
    """Within it the tensors have all their rows, in memory that it yields. Gradients, which every step makes anew, are
    dropped."""
    before, wide = [padding.tensor.data for padding in paddings], []
    for padding, data in zip(paddings, before, strict=True):
        more = data.new_full((padding.rows - len(data), *data.shape[1:]), padding.fill)
        wide.append(torch.cat([data, more]))
        padding.tensor.grad, padding.tensor.data = None, wide[-1]
    try:
        yield wide
    finally:
        for padding, data in zip(paddings, before, strict=True):
            padding.tensor.grad, padding.tensor.data = None, data


class Widened:
    """Tensors that are views of wider ones, whose first rows they are, until `close`.

    Args:
        paddings: the tensors, with as many rows as they have.
        wide: the wider ones.
    """

    def __init__(self, paddings: Sequence[Padding] = (), wide: Sequence[Tensor] = ()) -> None:
        self.own = [(padding.tensor, padding.tensor.data) for padding in paddings]
        for (tensor, own), data in zip(self.own, wide, strict=True):
            tensor.data = data[: len(own)]

    @property
    def rows(self) -> tuple[int, ...]:
        """How many rows each of the tensors has."""
        return tuple(len(own) for _, own in self.own)

    def close(self) -> None:
        """Give the tensors the memory back that they had, with their present values."""
        for tensor, own in self.own:
            tensor.data = own.copy_(tensor.data)
        self.own = []
