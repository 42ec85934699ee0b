"""Two small sequential trunks."""

from torch import nn

from hatrack import NETWORKS
from hatrack.seeds import seeded


def small_conv():
    with seeded(0, "trunk"):
        return nn.Sequential(
            nn.Dropout(0.1), nn.Conv2d(1, 6, 2, padding=1), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.Tanh(), nn.Dropout(0.3),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(5, 8), nn.ReLU(),
        )  # fmt: skip


def small_mlp(dropout=0.2):
    with seeded(0, "trunk"):
        return NETWORKS["mlp"]((1, 4, 4), widths=(12, 10), dropout=dropout, input_dropout=dropout)
