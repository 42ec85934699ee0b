"""What is computed from the labels of a task: the weights of its classes, and the mean and spread of its numbers."""

import torch
from torch import Tensor

WIDE = 1e4  # times its standard deviation: a mean beyond it leaves too few digits of float32 for what varies


def balanced(y: Tensor, classes: int) -> Tensor:
    """Return weights with which every class counts the same: (classes,), with a mean of 1 over the examples."""
    counts = torch.bincount(y, minlength=classes).clamp(min=1)
    return (len(y) / (classes * counts)).float()


def spread(y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation of every number; a constant one has a deviation of 1.

    Args:
        y: (examples, numbers), in any type.

    Returns:
        Both of shape (numbers,), float32, or float64 if float32 leaves too few digits for what varies: of times in seconds
        since 1970, for example, float32 keeps multiples of 128 only.
    """
    kept = torch.float64 if _needs_double(y) else torch.float32
    double = y.to(kept).double()
    mean, std = double.mean(0), double.std(0, correction=0)
    still = (double.amin(0) == double.amax(0)) | (std == 0)
    return mean.to(kept), torch.where(still, 1.0, std).to(kept)


def _needs_double(y: Tensor) -> bool:
    """Return whether numbers are too large, too small or too far from 0 in units of their spread for float32."""
    double = y.double()
    mean, std = double.mean(0), double.std(0, correction=0)
    varies = (double.amin(0) < double.amax(0)) & (std > 0)
    limits = torch.finfo(torch.float32)
    beyond = (mean.abs() > WIDE * std) | (std < limits.tiny)
    return bool((varies & beyond).any() or (double.abs() > limits.max).any())
