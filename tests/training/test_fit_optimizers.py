"""The optimizers of a fit: which gradients they drop, clip and follow."""

import torch
from torch import nn

from hatrack import Regime
from hatrack.training.fit_optimizers import Optimizers


def made():
    weights, own = [nn.Parameter(torch.ones(2)) for _ in range(3)], nn.Parameter(torch.ones(2))
    return Optimizers(Regime(lr=0.5), weights, {own: 0.1}), weights, own


def give(parameters):
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 3.0)


def test_every_gradient_is_dropped_also_after_a_step_that_was_not_done():
    optimizers, weights, own = made()
    for given, step in (([0, 1], True), ([2], False), ([0, 2], True), ([1], True), ([0, 1, 2], False)):
        give([*(weights[k] for k in given), own])
        if step:
            with torch.no_grad():
                optimizers.step(0.0)
        optimizers.zero_grad()
        assert all(parameter.grad is None for parameter in [*weights, own]), given


def test_only_weights_are_clipped_and_those_without_a_gradient_stay():
    optimizers, weights, own = made()
    give([weights[0], own])
    with torch.no_grad():
        optimizers.step(1.0)
    torch.testing.assert_close(weights[0].grad.norm(), torch.tensor(1.0))
    assert own.grad.tolist() == [3, 3]
    torch.testing.assert_close(weights[0].detach(), torch.full((2,), 1 - 0.5 / 2**0.5))
    torch.testing.assert_close(own.detach(), torch.full((2,), 0.7))
    assert all(weight.tolist() == [1, 1] for weight in weights[1:])
