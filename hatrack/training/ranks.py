"""Several processes that share the batches of a fit: what a fit asks of them. `clusters/rank_group.py` is the real thing."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn


class Ranks(Protocol):
    """The processes of a run, of which this one is number `rank`. Each computes one part of every batch.

    Attributes:
        rank: the number of this process, from 0.
        size: how many there are.
    """

    rank: int
    size: int

    def sum_parts(self, parameters: Sequence[nn.Parameter], loss: Tensor | None) -> Tensor:
        """Sum the gradients of all parts, in the order of the ranks, into the gradients of the parameters on every rank.

        Args:
            parameters: those that may have gradients, the same on every rank; those that have none take no part.
            loss: the loss of this rank's part, weighted by its share of the batch; None if the batch had no part for it.

        Returns:
            The loss of the whole batch.
        """

    def total(self, number: int) -> int:
        """Return the sum of a number over the ranks."""

    def check_method(self, method: nn.Module) -> None:
        """Raise a ValueError if a method can't be trained on parts of batches."""

    def check_same(self, method: nn.Module) -> None:
        """Raise a RuntimeError if a method does not have the same bits on every rank."""
