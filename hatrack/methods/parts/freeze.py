"""Freeze some entries of a parameter: they keep their exact bits, whatever the optimizer does."""

import torch
from torch import Tensor, nn

from hatrack.methods.parts.capturing import is_capturing

LARGE = 1e30  # replaces an infinite weight: it stays finite after a few more products
INTEGERS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def real(tensor: Tensor) -> Tensor:
    """Return a tensor of complex numbers as one of pairs (..., 2), which shares its memory; others as they are."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class Freeze:
    """Some entries of a parameter are frozen at their present values.

    The values are treated as integers, because selecting by a mask of booleans is ten times slower on a CPU, and arithmetic
    with zeros and ones would not be exact. In code for a CPU that torch compiles it is the other way round: there, selecting
    is fast and changing between floats and integers slow. Both have the same results.

    Args:
        parameter: the parameter.
        frozen: a mask of its shape, true where it is frozen.
        empty: nothing is frozen yet, in any parameter. Then nothing is done, unless the operations are captured for the
            compiler: they are included, so that the step of the first task has the form of the later ones. They leave finite
            values as they are.
    """

    def __init__(self, parameter: nn.Parameter, frozen: Tensor, *, empty: bool = False) -> None:
        self.parameter, self.empty = parameter, empty
        values = real(parameter.detach())
        self.integer = INTEGERS[values.dtype]
        kind = torch.int8 if parameter.is_cuda else self.integer  # a GPU reads fewer bytes, a CPU need not convert
        frozen = frozen.unsqueeze(-1) if parameter.is_complex() and frozen.dim() else frozen
        self.free = torch.empty_like(values, dtype=kind).copy_(torch.where(frozen, 0, -1))  # -1 has all bits set
        self.frozen_bits = values.view(self.integer) & ~self.free

    def to(self, device: torch.device) -> None:
        """Move to the device to which the parameter was moved."""
        self.free, self.frozen_bits = self.free.to(device), self.frozen_bits.to(device)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return self.empty and not is_capturing()

    @property
    def selects(self) -> bool:
        """Whether frozen entries are selected: on a CPU, while the operations are captured for the compiler."""
        return not self.parameter.is_cuda and is_capturing()

    def mask_grad(self) -> None:
        """Set the gradient of frozen entries to 0."""
        if self.parameter.grad is None or self.idle:
            return
        grad = real(self.parameter.grad)
        if self.selects:
            grad.copy_(torch.where(self.free != 0, grad, 0))
        else:
            grad.view(self.integer).bitwise_and_(self.free)

    def restore(self, *, finite: bool = True) -> None:
        """Give frozen entries their bits back.

        Args:
            finite: also replace infinite and NaN entries among the others, since infinity times a gate of 0 is not 0.
        """
        if self.idle:
            return
        values = real(self.parameter.detach())
        if self.selects:
            kept = _finite(values) if finite else values
            values.copy_(torch.where(self.free != 0, kept, self.frozen_bits.view(values.dtype)))
            return
        if finite:
            values.nan_to_num_(nan=0.0, posinf=LARGE, neginf=-LARGE)
        values.view(self.integer).bitwise_and_(self.free).bitwise_or_(self.frozen_bits)


def _finite(values: Tensor) -> Tensor:
    """Return values as `nan_to_num` does, by comparisons: torch's compiler has no vector code for isnan on a CPU."""
    finite = torch.where(values == values, values, 0.0)
    return torch.where(values == torch.inf, LARGE, torch.where(values == -torch.inf, -LARGE, finite))
