"""A small VGG-like network (Simonyan, Zisserman, 2014), https://arxiv.org/abs/1409.1556, for 32x32 images

Blocks of 3x3 convolutions that keep the size, each followed by 2x2 max-pooling, then linear layers with dropout. The parts
are named `features` and `classifier`, so that `--freeze features` keeps the convolutions as they are.
"""

from typing import Annotated

from torch import nn

from hatrack.options import Option, check


def vgg(
    shape: tuple[int, ...],
    *,
    filters: Annotated[tuple[int, ...], Option("filters of the convolutions of each block, by commas", low=1)] = (
        64,
        128,
        256,
    ),
    convolutions: Annotated[int, Option("convolutions in each block", low=1, high=100)] = 2,
    widths: Annotated[tuple[int, ...], Option("units of each linear layer, by commas", low=1)] = (512, 512),
    dropout: Annotated[float, Option("share of the activations dropped after each linear layer", low=0, high=0.99)] = 0.5,
) -> nn.Sequential:
    """Three blocks of two 3x3 convolutions with 64, 128, 256 filters and 2x2 max-pooling; then 512 and 512 units."""
    check(vgg, locals())
    if not filters or not widths:
        raise ValueError("filters must name at least one block, and widths at least one linear layer")
    least = 2 ** len(filters)
    if len(shape) != 3 or min(shape[1:]) < least:
        raise ValueError(
            f"vgg needs images of at least {least}x{least} pixels, not {shape}; the network mlp takes any inputs"
        )
    features, inputs = nn.Sequential(), shape[0]
    for count in filters:
        for _ in range(convolutions):
            features.extend([nn.Conv2d(inputs, count, 3, padding=1), nn.ReLU()])
            inputs = count
        features.append(nn.MaxPool2d(2))
    classifier = nn.Sequential(nn.Flatten())
    inputs *= (shape[1] // least) * (shape[2] // least)  # max-pooling halves a size and rounds down, once per block
    for width in widths:
        classifier.extend([nn.Linear(inputs, width), nn.ReLU(), nn.Dropout(dropout)])
        inputs = width
    trunk = nn.Sequential()
    trunk.add_module("features", features)
    trunk.add_module("classifier", classifier)
    return trunk
