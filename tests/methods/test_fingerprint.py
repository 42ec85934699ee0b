"""Fingerprints: they tell tensors apart by any bit, and see through how tensors lie in memory."""

import pytest
import torch

from hatrack.methods.parts import fingerprint as module
from hatrack.methods.parts.fingerprint import block_sums, fingerprint

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


def drawn(kind: torch.dtype, *shape: int) -> torch.Tensor:
    values = torch.randint(0, 2 if kind == torch.bool else 100, shape, generator=torch.Generator().manual_seed(0))
    return values.to(kind)


@pytest.mark.parametrize("kind", TYPES)
def test_every_bit_counts(kind, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 4)
    module._numbers.cache_clear()
    tensor = drawn(kind, 3, 5)
    before, raw = fingerprint({"a": tensor}), tensor.view(torch.uint8).reshape(-1)
    for place in range(len(raw)):
        for bit in (0,) if kind == torch.bool else range(8):
            raw[place] ^= 1 << bit
            assert fingerprint({"a": tensor}) != before
            raw[place] ^= 1 << bit
    assert fingerprint({"a": tensor}) == before
    module._numbers.cache_clear()


def test_sums_are_those_of_a_loop(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 4)
    module._numbers.cache_clear()
    tensor = torch.randn(10, generator=torch.Generator().manual_seed(1))
    numbers, bits = module._numbers(tensor.device).tolist(), tensor.view(torch.int32).tolist()
    assert all(number % 2 for row in numbers for number in row)
    for block, found in enumerate(block_sums(tensor).tolist()):
        part = bits[4 * block : 4 * block + 4]
        for row, value in zip(numbers, found, strict=True):
            assert (sum(b * n for b, n in zip(part, row, strict=False)) - value) % 2**64 == 0
    assert len(block_sums(tensor)) == 3
    module._numbers.cache_clear()


def test_names_types_shapes_and_order_count_but_not_the_place_in_memory():
    x = torch.arange(6.0).reshape(2, 3)
    same = fingerprint({"a": x, "b": -x})
    assert fingerprint({"b": -x, "a": x.t().contiguous().t()}) == same
    others = [{"a": -x, "b": x}, {"a": x, "c": -x}, {"a": x.view(3, 2), "b": -x}, {"a": x, "b": (-x).double()}, {"a": x}]
    assert same not in {fingerprint(other) for other in others}
    z = torch.complex(x, x)
    assert fingerprint({"a": z.conj()}) == fingerprint({"a": z.conj().resolve_conj()}) != fingerprint({"a": z})


def test_changes_that_a_plain_sum_would_miss():
    x = torch.zeros(1000)
    swapped, signs = x.clone(), torch.tensor([0.0, -0.0])
    x[3], x[700] = 1.0, 2.0
    swapped[3], swapped[700] = 2.0, 1.0
    assert fingerprint({"a": x}) != fingerprint({"a": swapped})
    assert fingerprint({"a": signs}) != fingerprint({"a": signs.flip(0)}) != fingerprint({"a": torch.zeros(2)})
    assert fingerprint({"a": torch.empty(0, 3)}) != fingerprint({"a": torch.empty(3, 0)})
    assert fingerprint({"a": torch.tensor(1.0)}) != fingerprint({"a": torch.tensor(2.0)})


@pytest.mark.gpu
def test_a_gpu_has_the_same_fingerprint_as_the_host():
    tensors = {"a": torch.randn(600, 1000), "b": drawn(torch.bool, 77), "c": torch.tensor(1.0)}
    assert fingerprint({name: t.cuda() for name, t in tensors.items()}) == fingerprint(tensors)
