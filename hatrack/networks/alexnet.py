"""The AlexNet-like network of HAT (001) for 32x32 images: three convolutions and two wide layers, no padding."""

from typing import Annotated

import torch
from torch import nn

from hatrack.options import Option, check


def alexnet(
    shape: tuple[int, ...],
    *,
    dropout: Annotated[float, Option("dropout after the third convolution and the two wide layers", low=0, high=0.99)] = 0.5,
    early_dropout: Annotated[float, Option("dropout after the first two convolutions", low=0, high=0.99)] = 0.2,
) -> nn.Sequential:
    """64, 128 and 256 filters of 4x4, 3x3 and 2x2, each followed by 2x2 max-pooling; then 2048 and 2048 units."""
    check(alexnet, locals())
    if len(shape) != 3 or shape[1] < 22 or shape[2] < shape[1]:
        needs = "at least 22x22 pixels that are not higher than wide"
        raise ValueError(f"alexnet needs images of {needs}, not {shape}; the network mlp takes any inputs")

    def block(inputs: int, outputs: int, kernel: int, drop: float) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, kernel), nn.ReLU(), nn.Dropout(drop), nn.MaxPool2d(2)]

    trunk = nn.Sequential(
        *block(shape[0], 64, shape[1] // 8, early_dropout),
        *block(64, 128, shape[1] // 10, early_dropout),
        *block(128, 256, 2, dropout),
        nn.Flatten(),
    )
    with torch.no_grad():
        inputs = trunk.eval()(torch.zeros(1, *shape)).shape[1]
    trunk.train()
    for width in (2048, 2048):
        trunk.extend([nn.Linear(inputs, width), nn.ReLU(), nn.Dropout(dropout)])
        inputs = width
    return trunk
