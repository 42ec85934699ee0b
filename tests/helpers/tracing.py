"""Operations that use parameters in ways of their own, and a trunk around each."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from hatrack.seeds import seeded
from tests.helpers.nets import Lambda

with seeded(0, "untraceable operations"):
    UNTRACEABLE = {  # the operation, and the beginning of the name of the parameter that cannot be traced
        "weight norm": (weight_norm(nn.Linear(8, 8)), "parametrizations.weight"),
        "spectral norm": (spectral_norm(nn.Linear(8, 8)), "parametrizations.weight"),
        "standardised weights": (
            Lambda(lambda own, x: F.linear(x, own.w - own.w.mean(1, keepdim=True)), w=nn.Parameter(torch.randn(8, 8))),
            "w",
        ),
        "a number": (Lambda(lambda own, x: x * own.scale.item(), scale=nn.Parameter(torch.ones(()))), "scale"),
    }
    FOLLOWED = {  # the operation, and the beginning of the name of a parameter that has gates or is kept per task
        "attention": (
            Lambda(lambda own, x: own.attend(x, x, x)[0], attend=nn.MultiheadAttention(8, 2, batch_first=True)),
            "attend",
        ),
        "a transformer's layer": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), "self_attn"),
        "an einsum": (Lambda(lambda own, x: torch.einsum("bti,io->bto", x, own.w), w=nn.Parameter(torch.randn(8, 8))), "w"),
        "a product with a bias": (
            Lambda(
                lambda own, x: torch.addmm(own.w[0], x.flatten(0, 1), own.w).view_as(x), w=nn.Parameter(torch.randn(8, 8))
            ),
            "w",
        ),
        "a product of weights": (
            Lambda(lambda own, x: x @ (own.a @ own.b), a=nn.Parameter(torch.randn(8, 2)), b=nn.Parameter(torch.randn(2, 8))),
            "a",
        ),
        "a scale": (Lambda(lambda own, x: x * own.scale, scale=nn.Parameter(torch.randn(8))), "scale"),
        "learned masks": (Lambda(lambda own, x: x * (own.scores > 0), scores=nn.Parameter(torch.randn(8))), "scores"),
        "positions": (Lambda(lambda own, x: x + own.places, places=nn.Parameter(torch.randn(3, 8))), "places"),
        "a normalised parameter": (
            Lambda(lambda own, x: x + F.layer_norm(own.q, (8,)), q=nn.Parameter(torch.randn(8))),
            "q",
        ),
        "part of a parameter as a scale": (
            Lambda(lambda own, x: F.layer_norm(x, (8,), own.w[0], own.w[1]), w=nn.Parameter(torch.randn(2, 8))),
            "w",
        ),
        "one bias for all": (
            Lambda(
                lambda own, x: F.linear(x, own.w, own.b), w=nn.Parameter(torch.randn(8, 8)), b=nn.Parameter(torch.randn(1))
            ),
            "b",
        ),
        "weights picked by value": (
            Lambda(lambda own, x: x @ own.bank[(x[0].sum() > 0).long()[None]][0], bank=nn.Parameter(torch.randn(2, 8, 8))),
            "bank",
        ),
    }


def trunk_around(part):
    """Return a trunk that maps three vectors of 5 to 4 features, with the operation on vectors of 8 in the middle."""
    trunk = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), copy.deepcopy(part), nn.ReLU(), nn.Flatten(), nn.Linear(24, 4))
    return trunk.eval()
