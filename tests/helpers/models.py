"""A saved model and a trunk to load it with."""

from torch import nn

from hatrack.networks.mlp import mlp
from hatrack.seeds import seeded


def fresh(seed: int = 9, widths: tuple[int, ...] = (24, 24), shape: tuple[int, ...] = (1, 4, 4)) -> nn.Module:
    """A trunk like that of `make`, of other values."""
    with seeded(seed, "weights"):
        return mlp(shape, widths=widths, dropout=0.2, input_dropout=0.1)
