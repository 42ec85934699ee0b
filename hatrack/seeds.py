"""One seed, one world: every source of randomness draws from a generator of its own, derived from the seed by name."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive(seed: int, *names: str | int) -> int:
    """A 63-bit seed for one purpose; another name, or another seed, gives an unrelated one."""
    plain = tuple(name if isinstance(name, str) else int(name) for name in (seed, *names))
    digest = hashlib.sha256(repr(plain).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def generator(seed: int, *names: str | int) -> torch.Generator:
    """A generator on the CPU, so that a seed means the same on every device."""
    return torch.Generator().manual_seed(derive(seed, *names))


@contextmanager
def seeded(seed: int, *names: str | int) -> Iterator[None]:
    """Within it, torch's global generators (initial weights, dropout) draw from this seed; afterwards they are as before."""
    with torch.random.fork_rng():
        torch.manual_seed(derive(seed, *names))
        yield
