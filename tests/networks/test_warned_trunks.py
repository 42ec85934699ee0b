"""What is warned of when a network is made, by name: tensors that change in evaluation mode, and layers that PyTorch does
not know. What looks alike and does no harm is not."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from hatrack import Network


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.words(x).mean(1)


@pytest.mark.parametrize(
    ("trunk", "example", "name"),
    [(Counts(), torch.randn(2, 4), "'calls'"), (Words(), torch.tensor([[1, 2], [3, 4]]), "'words.weight'")],
)
def test_what_is_changed_in_evaluation_mode_is_named(trunk, example, name):
    trunk.train()
    with pytest.warns(UserWarning, match=f"the trunk changes {name} also in evaluation mode"):
        Network(trunk, [2], example=example)
    assert trunk.training


class Caches(nn.Module):
    """Writes a buffer before it reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.copy_(x.detach()[0])
        return self.layer(x - self.seen)


@pytest.mark.parametrize(
    "trunk", [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), Caches(), nn.Sequential(nn.LazyLinear(4), nn.ReLU())]
)
def test_statistics_of_training_caches_and_lazy_layers_are_no_reason(trunk):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Network(trunk, [2], example=torch.randn(2, 4))


class Holds(nn.Module):
    """Computes with a layer that is kept in one of several ways.

    Args:
        kept: what the attribute `layers` holds, from the layer.
    """

    def __init__(self, kept) -> None:
        super().__init__()
        self.first, layer = nn.Linear(4, 4), nn.Linear(4, 4)
        self.layers, self.apply = kept(layer), lambda x: layer(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.apply(self.first(x))


@pytest.mark.parametrize(
    "kept",
    [lambda layer: [layer], lambda layer: {"a": (layer, 1)}, lambda layer: [[layer.weight], layer.bias]],
    ids=["list", "dict", "parameters"],
)
def test_layers_that_pytorch_does_not_register_are_named(kept):
    with pytest.warns(UserWarning, match=r"layers or parameters in '1\.layers'") as caught:
        Network(nn.Sequential(nn.Identity(), Holds(kept)), [2], example=torch.randn(2, 4))
    assert len(caught) == 1
    assert caught[0].filename == __file__


class Again(nn.Module):
    """Layers in lists that are registered as well, layers without tensors, and plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.mean = nn.Linear(4, 4), nn.BatchNorm1d(4), torch.zeros(4)
        self.inner = nn.ModuleList([nn.Linear(4, 4)])
        self.order, self.by_name = (
            [self.layer, nn.ReLU(), self.norm, *self.inner],
            {"w": self.layer.weight, "mean": [self.mean]},
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.order:
            x = layer(x)
        return x - self.mean


class Steps(nn.Module):
    """A recurrent layer with a computed weight, whose list of weights holds the old one until it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = parametrizations.weight_norm(nn.GRU(4, 4), "weight_hh_l0")

    def forward(self, x: Tensor) -> Tensor:
        return self.steps(x[None])[0][0]


@pytest.mark.parametrize("trunk", [Again(), Steps()])
def test_lists_of_registered_layers_and_of_plain_tensors_are_no_reason(trunk):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Network(trunk, [2], example=torch.randn(2, 4))
