"""The convolutional network of the EWC report (002): one convolution, two wide layers, 13.9 million parameters."""

from typing import Annotated

from torch import nn

from hatrack.options import Option, check


def cnn(
    shape: tuple[int, ...],
    *,
    dropout: Annotated[float, Option("share of the activations dropped after each wide layer", low=0, high=0.99)] = 0.5,
    input_dropout: Annotated[float, Option("share of the inputs dropped", low=0, high=0.99)] = 0.2,
) -> nn.Sequential:
    """64 filters of 3x3 (same size), 2x2 max-pooling, then 1024 and 1024 units, with ReLU."""
    check(cnn, locals())
    if len(shape) != 3 or min(shape[1:]) < 2:
        raise ValueError(f"cnn needs images, not inputs of shape {shape}; the network mlp takes any inputs")
    channels, height, width = shape
    return nn.Sequential(
        nn.Dropout(input_dropout),
        nn.Conv2d(channels, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (height // 2) * (width // 2), 1024),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Dropout(dropout),
    )
