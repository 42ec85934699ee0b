"""Masks of weights from one value per unit, by tables on any device: see `Units.weight_masks`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hatrack.tracing.dependencies import ALWAYS_ACTIVE
from hatrack.tracing.trace import Use


class MaskTables:
    """Which weights connect which units, on one device.

    Only the smallest, the largest and copies of values are taken, so that masks have the same bits on every device. Values
    that are bools have masks of bools, which take a quarter of the memory, unless the tables list positions.

    Args:
        uses: which weights connect which units.
        unused: (positions,), whether an element of the parameters is frozen because the example did not use it.
        members: (sets, size of the largest), the units of every dependency set, padded with -1.
    """

    def __init__(self, uses: Sequence[Use], unused: Tensor, members: Tensor) -> None:
        self.uses, self.unused, self.members = uses, unused, members
        self.scattered = any(use.positions is not None for use in uses)

    def to(self, device: torch.device) -> "MaskTables":
        """Return the tables on a device. They stay on the CPU if they list positions, which take twice the memory of the
        weights."""
        if self.scattered:
            return self
        uses = [Use(None, use.start, use.shape, use.writes.to(device), use.reads.to(device)) for use in self.uses]
        return MaskTables(uses, self.unused.to(device), self.members.to(device))

    def set_values(self, values: Tensor) -> Tensor:
        """Return for every dependency set the largest value of its units: 0 if it is empty, 1 if it is always active."""
        largest = torch.cat([values, values.new_zeros(1)])[self.members].amax(1)
        largest[ALWAYS_ACTIVE] = 1
        return largest

    def masks(self, values: Tensor) -> Tensor:
        """Return the masks of all parameters (positions,), from one value per unit: see `Units.weight_masks`."""
        bools = values.dtype == torch.bool and not self.scattered
        kind = torch.uint8 if bools else torch.float32  # a CPU is a hundred times quicker with bytes than with bools
        values = values.detach().to(self.unused.device, kind)
        set_values, total = self.set_values(values), self.unused.to(kind, copy=True)
        values = torch.cat([values, values.new_ones(1)])  # the last stands for ALWAYS_OPEN
        for use in self.uses:
            least = torch.minimum(values[use.writes], set_values[use.reads])
            if use.positions is None:
                part = total[use.start : use.start + use.shape.numel()].view(use.shape)
                torch.maximum(part, least, out=part)
            else:
                total.scatter_reduce_(0, use.positions.reshape(-1), least.expand(use.shape).reshape(-1), "amax")
        return total.view(torch.bool) if bools else total
