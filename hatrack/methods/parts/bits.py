"""Store masks as bits: eight booleans in a byte."""

import torch
from torch import Tensor
from torch.nn import functional as F


def pack(bits: Tensor) -> Tensor:
    """Store booleans (count,) as bits of bytes (count / 8, rounded up)."""
    rows = F.pad(bits.to(torch.uint8), (0, -len(bits) % 8)).view(-1, 8)
    return (rows << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, count: int) -> Tensor:
    """Return the first `count` bits of bytes as booleans."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> shifts) & 1).view(-1)[:count].bool()
