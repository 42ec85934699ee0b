"""Dependency sets: for an element of a tensor, the units whose closed gates make this element exactly zero.

Example: `h = linear(x)` has the units 0 and 1, and the trunk then computes `y = relu(h[:, 0] + h[:, 1])`.

    h[:, 0]   {0}      zero if the gate of unit 0 is closed
    h[:, 1]   {1}      zero if the gate of unit 1 is closed
    y         {0, 1}   zero if both are closed, because 0 + 0 = 0 and relu(0) = 0

If a task closes the gates of units 0 and 1, then y is exactly zero for this task, so a weight that is multiplied by y does
not influence the task's outputs and may be trained for other tasks. If one of the two gates is open, y may be non-zero and
this weight has to stay as it is.

Why this is correct: a set is a promise "these gates closed => this element is 0". A larger set promises less, and
ALWAYS_ACTIVE promises nothing. So a rule may always return a larger set, or ALWAYS_ACTIVE, if it does not know better:
more weights are then frozen than necessary, but never too few.

Every set that occurs has a number, its set id, so that the sets of all elements of a tensor are an integer tensor.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ALWAYS_ZERO = 0  # the id of the empty set: the element is zero whatever the gates are
ALWAYS_ACTIVE = 1  # the id of an element that no known set of closed gates makes zero; its entry in `sets` is None


class DependencySets:
    """The dependency sets that occur in one trace, each with an id, and the operations on tensors of such ids.

    Args:
        sets: sets of an earlier trace, in the order of their ids.

    Attributes:
        sets: the set of every id; None for ALWAYS_ACTIVE.
    """

    def __init__(self, sets: Sequence[frozenset[int] | None] = (frozenset(), None)) -> None:
        self.sets: list[frozenset[int] | None] = list(sets)
        self._ids: dict[frozenset[int] | None, int] = {units: k for k, units in enumerate(self.sets)}

    def id_of(self, units: frozenset[int] | None) -> int:
        """Return the id of a set of units; a new set gets the next free id."""
        if units not in self._ids:
            self._ids[units] = len(self.sets)
            self.sets.append(units)
        return self._ids[units]

    def union(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the set ids of a sum a + b: it is zero if both terms are, so both sets are needed."""
        return self._combine(self._union, a, b)

    def smaller(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the set ids of a product a * b: it is zero if either factor is, so the smaller set is enough."""
        return self._combine(self._smaller, a, b)

    def reduce(self, ids: Tensor, dims: Sequence[int]) -> Tensor:
        """Return the union over some dimensions; these dimensions then have length 1."""
        for dim in dims:
            while ids.shape[dim] > 1:
                if torch.equal(ids, ids.narrow(dim, 0, 1).expand_as(ids)):
                    ids = ids.narrow(dim, 0, 1)
                    break
                half = (ids.shape[dim] + 1) // 2  # the two halves overlap in the middle if the length is odd
                ids = self.union(ids.narrow(dim, 0, half), ids.narrow(dim, ids.shape[dim] - half, half))
        return ids

    def _union(self, a: int, b: int) -> int:
        one, two = self.sets[a], self.sets[b]
        return ALWAYS_ACTIVE if one is None or two is None else self.id_of(one | two)

    def _smaller(self, a: int, b: int) -> int:
        one, two = self.sets[a], self.sets[b]
        return a if two is None or (one is not None and len(one) <= len(two)) else b

    def _combine(self, rule: Callable[[int, int], int], a: Tensor, b: Tensor) -> Tensor:
        """Apply a rule to pairs of ids, once for every pair that occurs."""
        a, b = torch.broadcast_tensors(a, b)  # type: ignore[no-untyped-call]
        count = len(self.sets)
        codes, inverse = (a * count + b).unique(return_inverse=True)  # type: ignore[no-untyped-call]
        return torch.tensor([rule(*divmod(code, count)) for code in codes.tolist()], dtype=torch.int64)[inverse]
