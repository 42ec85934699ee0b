"""Frozen means frozen: some entries of a parameter keep their exact bits, whatever an optimizer does to them."""

import torch
from torch import Tensor, nn

LARGE = 1e30  # what an infinite weight becomes: finite, even after a few more products
INTEGERS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


class Freeze:
    """The entries of a parameter where `frozen` is true, with the bits that they have now.

    It works on the bits, because selecting by a mask of booleans is ten times slower on a CPU and arithmetic with zeros
    and ones would not be exact.
    """

    def __init__(self, parameter: nn.Parameter, frozen: Tensor) -> None:
        self.parameter = parameter
        self.integer = INTEGERS[parameter.dtype]
        kind = (
            torch.int8 if parameter.is_cuda else self.integer
        )  # -1 is all bits in both: a GPU reads less, a CPU converts less
        self.free = torch.empty_like(parameter, dtype=kind).copy_(torch.where(frozen, 0, -1))  # all bits, or none
        self.kept = parameter.detach().view(self.integer) & ~self.free

    def mask_grad(self) -> None:
        """The gradient of frozen entries becomes 0."""
        if self.parameter.grad is not None:
            self.parameter.grad.view(self.integer).bitwise_and_(self.free)

    def restore(self, *, finite: bool = True) -> None:
        """Frozen entries get their bits back; the others stay finite, since a weight of infinity times 0 is not 0."""
        values = self.parameter.detach()
        if finite:
            values.nan_to_num_(nan=0.0, posinf=LARGE, neginf=-LARGE)
        values.view(self.integer).bitwise_and_(self.free).bitwise_or_(self.kept)
