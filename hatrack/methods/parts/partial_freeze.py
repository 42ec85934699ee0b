"""Freeze entries of a parameter by a share from 0 to 1, as soft masks do: a part of every update is taken back."""

import torch
from torch import Tensor, nn

from hatrack.methods.parts.freeze import Freeze


class PartialFreeze:
    """How far earlier tasks freeze one parameter while a new task is learned.

    Args:
        parameter: the parameter.
        share: a tensor of its shape: 1 freezes an entry completely, 0 not at all.
        soft: whether there may be shares between them.
        empty: nothing is frozen yet, in any parameter: see `Freeze`.

    Attributes:
        freeze: the entries that are frozen completely.
    """

    def __init__(self, parameter: nn.Parameter, share: Tensor, *, soft: bool, empty: bool) -> None:
        share = share.to(parameter.device)
        self.parameter, self.freeze = parameter, Freeze(parameter, share == 1, empty=empty)
        self.share = share.to(parameter.dtype) if soft else None
        self.before = parameter.detach().clone() if soft else None  # the values before the update

    def to(self, device: torch.device) -> None:
        """Move to the device to which the parameter was moved."""
        self.freeze.to(device)
        if self.share is not None and self.before is not None:
            self.share, self.before = self.share.to(device), self.before.to(device)

    def mask_grad(self) -> None:
        """Set the gradient of entries that are frozen completely to 0, and note the values before the update."""
        self.freeze.mask_grad()
        if self.before is not None and not self.freeze.idle:
            self.before.copy_(self.parameter)

    def restore(self, *, finite: bool = True) -> None:
        """Take the update back by the share, and give entries that are frozen completely their bits back. Gradients that are
        smaller by the share would not suffice: Adam normalises them.

        Args:
            finite: also replace infinite and NaN entries among the others: see `Freeze.restore`.
        """
        if self.share is not None and self.before is not None and not self.freeze.idle:
            self.parameter.lerp_(self.before, self.share)
        self.freeze.restore(finite=finite)
