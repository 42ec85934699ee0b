"""Freezing: frozen entries of a parameter keep their bits in every type of number, and the others are free."""

import contextlib
import math

import pytest
import torch
from torch import nn

from hatrack.methods.parts.capturing import CapturingMode
from hatrack.methods.parts.freeze import LARGE, Freeze

TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]
FROZEN = torch.tensor([[True, False, True], [False, False, True]])


class Capturing(CapturingMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def parameter(dtype: torch.dtype, shape: tuple[int, ...] = (2, 3)) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("dtype", TYPES)
def test_frozen_entries_keep_their_bits_and_the_others_change(dtype):
    weight = parameter(dtype)
    before, freeze = weight.detach().clone(), Freeze(weight, FROZEN)
    with torch.no_grad():
        weight.mul_(-3).add_(1)
    after = weight.detach().clone()
    freeze.restore()
    assert torch.equal(weight[FROZEN], before[FROZEN])
    assert torch.equal(weight[~FROZEN], after[~FROZEN])


@pytest.mark.parametrize("dtype", TYPES)
def test_gradients_of_frozen_entries_are_zero_and_the_others_stay(dtype):
    weight = parameter(dtype)
    freeze = Freeze(weight, FROZEN)
    freeze.mask_grad()
    assert weight.grad is None
    weight.grad = torch.full_like(weight, -2.5)
    weight.grad[0, 0] = math.nan
    freeze.mask_grad()
    assert torch.equal(weight.grad, torch.where(FROZEN, 0.0, -2.5).to(dtype))


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_a_parameter_of_one_number(dtype, frozen):
    weight = parameter(dtype, ())
    before, freeze = weight.detach().clone(), Freeze(weight, torch.tensor(frozen))
    with torch.no_grad():
        weight.add_(1)
    freeze.restore()
    assert torch.equal(weight, before) == frozen


def test_entries_that_are_free_are_made_finite_unless_told_otherwise():
    weight = nn.Parameter(torch.tensor([math.inf, -math.inf, math.nan, 2.0]))
    freeze = Freeze(weight, torch.tensor([False, False, False, True]))
    freeze.restore(finite=False)
    assert weight[:2].tolist() == [math.inf, -math.inf]
    assert weight[2].isnan()
    freeze.restore()
    assert weight.tolist() == pytest.approx([LARGE, -LARGE, 0.0, 2.0])


def test_if_nothing_is_frozen_anywhere_nothing_is_done_until_operations_are_captured():
    weight = nn.Parameter(torch.tensor([math.inf, 2.0]))
    freeze = Freeze(weight, torch.tensor([True, False]), empty=True)  # the mask shows whether it is applied
    weight.grad = torch.ones(2)
    with torch.no_grad():
        weight.fill_(math.inf)
    freeze.mask_grad()
    freeze.restore()
    assert freeze.idle
    assert weight.grad.tolist() == [1.0, 1.0]
    assert weight.tolist() == [math.inf, math.inf]

    with Capturing():
        assert not freeze.idle
        freeze.mask_grad()
        freeze.restore()
    assert weight.grad.tolist() == [0.0, 1.0]
    assert weight.tolist() == pytest.approx([math.inf, LARGE])


def test_a_freeze_is_not_idle_by_default():
    assert not Freeze(parameter(torch.float32), FROZEN).idle


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
def test_what_is_captured_gives_the_same_bits(dtype, finite):
    """For the compiler frozen entries are selected; otherwise they are treated as integers."""
    found = []
    for captured in (False, True):
        weight = parameter(dtype, (4, 8))
        with torch.no_grad():
            weight[:2, 0] = -0.0
            weight[2, 0] = math.nan  # frozen with these bits
        freeze = Freeze(weight, (torch.arange(32) % 3 == 0).view(4, 8))
        weight.grad = torch.where(torch.arange(8) < 4, -weight.detach(), -0.0)
        odd = torch.tensor([math.inf, -math.inf, math.nan, -0.0, 1e-7, 6e4, -3.0, 0.0]).to(dtype)
        with torch.no_grad():
            weight.copy_(odd.expand(4, 8))
        with Capturing() if captured else contextlib.nullcontext():
            freeze.mask_grad()
            freeze.restore(finite=finite)
        found += [torch.view_as_real(t) if dtype.is_complex else t for t in (weight.detach(), weight.grad)]
    for one, two in zip(found[:2], found[2:], strict=True):
        assert torch.equal(one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8))
