"""A recurrent network of gated units (Cho et al., 2014), https://arxiv.org/abs/1406.1078, that reads images row by row

A row of pixels is one step of the sequence: 28 steps of 28 numbers for MNIST, 32 steps of 96 for colour images of 32x32.
The features are the state after the last row. Every layer is an nn.GRU of its own with dropout behind it: the dropout within
an nn.GRU of several layers has a state of its own on a GPU, which no seed sets and no checkpoint holds.
"""

from typing import Annotated

from torch import Tensor, nn

from hatrack.options import Option, check


class Rows(nn.Module):
    """Turns images (batch, channels, height, width) into sequences (batch, height, channels x width)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)


class Layer(nn.Module):
    """Gated recurrent units: the state of every unit after every step."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.gru = nn.GRU(inputs, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.gru(x)[0]
        return out.contiguous()  # dropout draws its random numbers in the order of memory, which depends on the engine


class Last(nn.Module):
    """The state after the last step."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, -1]


def gru(
    shape: tuple[int, ...],
    *,
    width: Annotated[int, Option("units of every layer", low=1)] = 256,
    layers: Annotated[int, Option("recurrent layers, each of which reads the one before it", low=1)] = 2,
    dropout: Annotated[float, Option("share of the activations dropped after each layer", low=0, high=0.99)] = 0.2,
) -> nn.Sequential:
    """Two recurrent layers of 256 gated units that read an image row by row; the state after the last row."""
    check(gru, locals())
    if len(shape) != 3:
        raise ValueError(f"gru needs images, not inputs of shape {shape}; the network mlp takes any inputs")
    parts, inputs = [], shape[0] * shape[2]
    for _ in range(layers):
        parts += [Layer(inputs, width), nn.Dropout(dropout)]
        inputs = width
    return nn.Sequential(Rows(), *parts, Last())
