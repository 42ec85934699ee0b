"""Fingerprints of tensors, computed where the tensors lie: a GPU need not send them to the host to see that none changed.

The bits of a block are integers b_1, b_2, ..., and its fingerprint is the sum of b_k times an odd number of 64 random bits,
modulo 2^64, for two such sequences of numbers. One integer that changes always changes the sums: an odd number times what it
changed by is not 0. For changes of several, two sums that stay the same have a chance of 2^-64 or less.
"""

import hashlib
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from hatrack.seeds import generator

BLOCK = 2**18  # integers in a block
INTEGERS = {1: torch.int8, 2: torch.int16}  # by the bytes of an element; those of more are split into integers of 4


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Return a fingerprint of the names, types, shapes and bits of tensors. The devices are waited for once each."""
    sums: dict[torch.device, list[Tensor]] = {}
    for name in sorted(tensors):
        sums.setdefault(tensors[name].device, []).append(block_sums(tensors[name]))
    found = hashlib.sha256(repr([(name, t.dtype, tuple(t.shape)) for name, t in sorted(tensors.items())]).encode())
    for parts in sums.values():
        found.update(torch.cat(parts).cpu().numpy().data)
    return found.hexdigest()


@torch.no_grad()
def block_sums(tensor: Tensor) -> Tensor:
    """Return the two sums of every block of a tensor's bits: (blocks, 2), int64."""
    flat = tensor.detach().resolve_conj().contiguous().reshape(-1)
    bits = flat.view(INTEGERS.get(flat.element_size(), torch.int32))
    numbers, whole = _numbers(bits.device), len(bits) // BLOCK * BLOCK
    parts = [bits[:whole].view(-1, 1, BLOCK)] if whole else []
    parts += [bits[whole:].view(1, 1, -1)] if whole < len(bits) else []
    sums = [(part * numbers[:, : part.shape[-1]]).sum(-1) for part in parts]
    return torch.cat(sums) if sums else bits.new_zeros((0, 2), dtype=torch.int64)


@cache
def _numbers(device: torch.device) -> Tensor:
    """Return the odd numbers that bits are multiplied by, (2, BLOCK), the same in every process."""
    draw = generator(0, "fingerprints")
    return torch.randint(-(2**62), 2**62, (2, BLOCK), generator=draw).mul_(2).add_(1).to(device)
