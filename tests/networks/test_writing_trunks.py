"""A trunk that changes its tensors in evaluation mode is warned of, by name; one that does so in training alone is not."""

import warnings

import pytest
import torch
from torch import Tensor, nn

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
