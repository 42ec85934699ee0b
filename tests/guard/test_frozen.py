"""Frozen weights under a guard: one operation over all of them gives the bits that one for each gives."""

import math

import pytest
import torch
from torch import nn

from hatrack.guard import frozen
from hatrack.guard.frozen import FrozenBits
from hatrack.methods.parts.freeze import Freeze

STRANGE = [0.0, -0.0, 1.0, -1.5, math.inf, -math.inf, math.nan, 1e-40, -1e-40, 3e38]  # denormal and huge ones among them
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


def parameters() -> list[nn.Parameter]:
    """One of every type and some layouts, with values that arithmetic would not leave alone."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for dtype in TYPES:
        for shape in ((), (40,), (4, 5, 3, 3)):
            values = torch.tensor(STRANGE)[torch.randint(len(STRANGE), shape, generator=draw)]
            found.append(nn.Parameter((torch.complex(values, -values) if dtype.is_complex else values).to(dtype)))
    found.append(nn.Parameter(torch.randn(4, 5, 3, 3, generator=draw).to(memory_format=torch.channels_last)))
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().flatten().clone().view(torch.uint8)


def freezes_of(own: list[nn.Parameter]) -> list[Freeze]:
    draw = torch.Generator().manual_seed(1)
    return [Freeze(p, torch.rand(p.shape, generator=draw) < 0.5) for p in own]


def moved_and_restored(monkeypatch, together: bool, finite: bool) -> list[torch.Tensor]:
    """The bits of parameters and gradients after a step that moves everything, and what a guard then does."""
    monkeypatch.setattr(frozen, "TOGETHER", ("cpu",) if together else ())
    own = parameters()
    kept = FrozenBits(freezes_of(own), finite=finite)
    draw = torch.Generator().manual_seed(2)
    for number, p in enumerate(own):
        p.grad = torch.empty_like(p).copy_(torch.tensor(STRANGE)[torch.randint(len(STRANGE), p.shape, generator=draw)])
        p.data.copy_(torch.tensor(STRANGE)[torch.randint(len(STRANGE), p.shape, generator=draw)])
        if not number % 7:
            p.grad = None  # as of a layer that a pass leaves out
    kept.mask_grads()
    kept.restore()
    assert bool(kept.groups) == together
    return [bits(t) for p in own for t in (p, p.grad) if t is not None]


@pytest.mark.parametrize("finite", [True, False])
def test_one_operation_over_all_weights_gives_the_same_bits(monkeypatch, finite):
    singly = moved_and_restored(monkeypatch, False, finite)
    together = moved_and_restored(monkeypatch, True, finite)
    assert len(singly) == len(together) > 20
    assert all(torch.equal(a, b) for a, b in zip(singly, together, strict=True))


@pytest.mark.parametrize("together", [True, False])
def test_frozen_entries_have_their_bits_and_the_others_those_of_the_step(monkeypatch, together):
    monkeypatch.setattr(frozen, "TOGETHER", ("cpu",) if together else ())
    parameter = nn.Parameter(torch.tensor([-0.0, math.nan, 1.0, 2.0]))
    before = bits(parameter).view(4, 4)
    kept = FrozenBits([Freeze(parameter, torch.tensor([True, True, True, False]))])
    parameter.data.copy_(torch.tensor([5.0, 6.0, 7.0, 8.0]))
    parameter.grad = torch.tensor([1.0, math.inf, -1.0, -2.0])
    kept.mask_grads()
    kept.restore()
    assert torch.equal(bits(parameter).view(4, 4)[:3], before[:3])
    assert parameter[3].item() == 8.0
    assert parameter.grad.tolist() == [0.0, 0.0, 0.0, -2.0]
