"""Springs on weights: their energy and their pull, against a plain loop over single numbers."""

import pytest
import torch
from torch import nn

from hatrack.methods.parts.springs import spring_energy

SHAPES = ((2, 3), (4,), (1, 2, 2))


def example():
    draw = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, generator=draw, dtype=torch.float64)) for shape in SHAPES]
    return weights, *torch.randn((2, 17), generator=draw, dtype=torch.float64)  # the vectors are longer than the weights


@pytest.mark.parametrize("stiff", [True, False])
def test_energy_and_pull_are_those_of_a_plain_loop(stiff):
    weights, anchor, stiffness = example()
    energy = spring_energy(weights, anchor, stiffness if stiff else None)
    (3 * energy).backward()
    place, expected = 0, 0.0
    for weight in weights:
        for value, pull in zip(weight.detach().flatten().tolist(), weight.grad.flatten().tolist(), strict=True):
            spring, stretch = stiffness[place].item() if stiff else 1.0, value - anchor[place].item()
            expected += spring * stretch**2 / 2
            assert pull == pytest.approx(3 * spring * stretch, rel=1e-12)
            place += 1
    assert energy.item() == pytest.approx(expected, rel=1e-12)


def test_nothing_is_written_but_gradients():
    weights, anchor, stiffness = example()
    before = [t.clone() for t in (*weights, anchor, stiffness)]
    for _ in range(2):
        spring_energy(weights, anchor, stiffness).backward()
        spring_energy(weights, anchor).backward()
    assert all(torch.equal(one, two) for one, two in zip(before, (*weights, anchor, stiffness), strict=True))


def test_weights_that_are_not_trained_and_none_at_all():
    weights, anchor, stiffness = example()
    weights[1].requires_grad_(False)
    spring_energy(weights, anchor, stiffness).backward()
    assert [weight.grad is None for weight in weights] == [False, True, False]
    assert spring_energy([], anchor).item() == 0


@pytest.mark.parametrize("stiff", [True, False])
def test_the_second_derivative_is_the_stiffness(stiff):
    weights, anchor, stiffness = example()
    pulls = torch.autograd.grad(spring_energy(weights, anchor, stiffness if stiff else None), weights, create_graph=True)
    curvature = torch.autograd.grad(sum(pull.sum() for pull in pulls), weights)
    expected = stiffness[:14] if stiff else torch.ones(14)
    assert torch.equal(torch.cat([part.flatten() for part in curvature]), expected.to(torch.float64))


def test_autocast_changes_nothing():
    """A matrix product would be of bfloat16, and so would the strength by which the pull is multiplied."""
    weights, anchor, stiffness = example()
    weights = [nn.Parameter(weight.detach().float()) for weight in weights]
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            energy = spring_energy(weights, anchor.float(), stiffness.float())
            found.append([energy.detach(), *torch.autograd.grad(4999 * energy, weights)])
    assert all(torch.equal(one, two) and one.dtype == two.dtype for one, two in zip(*found, strict=True))


def test_a_single_weight_is_not_moved():
    weight = nn.Parameter(torch.ones(3))
    spring_energy([weight], torch.zeros(3)).backward()
    assert weight.tolist() == weight.grad.tolist() == [1, 1, 1]
