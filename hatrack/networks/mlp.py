"""A multi-layer perceptron. The defaults are the network that HAT (001) uses on permuted MNIST."""

import math
from typing import Annotated

from torch import nn

from hatrack.options import Option, check

Share = Annotated[float, Option("share of the activations dropped after each hidden layer", low=0, high=0.99)]


def mlp(
    shape: tuple[int, ...],
    *,
    widths: Annotated[tuple[int, ...], Option("units of each hidden layer, separated by commas", low=1)] = (2000, 2000),
    dropout: Share = 0.5,
    input_dropout: Annotated[float, Option("share of the inputs dropped", low=0, high=0.99)] = 0.2,
) -> nn.Sequential:
    """Hidden layers of any widths, ReLU, dropout on the input and after every layer."""
    check(mlp, locals())
    if not widths:
        raise ValueError("widths must name at least one hidden layer")
    layers: list[nn.Module] = [nn.Flatten()]
    if input_dropout:
        layers.append(nn.Dropout(input_dropout))
    inputs = math.prod(shape)
    for width in widths:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        if dropout:
            layers.append(nn.Dropout(dropout))
        inputs = width
    return nn.Sequential(*layers)
