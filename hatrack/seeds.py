"""Seeds for every purpose, derived from one seed: each source of randomness has a generator of its own, found by name."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive(seed: int, *names: str | int) -> int:
    """Derive a 63-bit seed for one purpose.

    Args:
        seed: the seed of the run.
        names: the purpose, such as "batches" and the number of an epoch. Other names, or another seed, give an unrelated
            result.
    """
    plain = tuple(name if isinstance(name, str) else int(name) for name in (seed, *names))
    digest = hashlib.sha256(repr(plain).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def generator(seed: int, *names: str | int) -> torch.Generator:
    """Return a generator for one purpose (see `derive`); it is on the CPU, so that all devices get the same numbers."""
    return torch.Generator().manual_seed(derive(seed, *names))


@contextmanager
def seeded(seed: int, *names: str | int) -> Iterator[None]:
    """Seed torch's global generators (initial weights, dropout) within a `with` block; afterwards restore their states."""
    with torch.random.fork_rng():
        value = derive(seed, *names)
        torch.default_generator.manual_seed(value)  # torch.manual_seed would also note a stack trace for absent devices
        if torch.cuda.is_available():
            torch.cuda.manual_seed_all(value)
        yield
