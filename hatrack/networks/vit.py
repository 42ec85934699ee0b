"""A small vision transformer (Dosovitskiy, Beyer et al., 2020), https://arxiv.org/abs/2010.11929, for 32x32 images

Patches of 4x4 pixels, learned positions, blocks with a norm in front of each branch (pre-norm), and the mean over all
patches instead of a class token. Attention is written in plain operations: the backward pass of the fused kernels sums in a
random order on a GPU, so that a run that continues would not end with the same bits.
"""

import math
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hatrack.options import Option, check

SCALE = 0.02  # the standard deviation of initial weights and positions, as in the authors' code


class Attention(nn.Module):
    """Self-attention with several heads, each of which sees its own part of the channels."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self._split(layer(x)) for layer in (self.query, self.key, self.value))
        weights = (query @ key.transpose(2, 3) / math.sqrt(key.shape[3])).softmax(3)  # (batch, heads, patches, patches)
        out: Tensor = self.out((weights @ value).transpose(1, 2).flatten(2))
        return out

    def _split(self, x: Tensor) -> Tensor:
        """Return (batch, heads, patches, channels of a head) from (batch, patches, channels)."""
        return x.reshape(*x.shape[:2], self.heads, -1).transpose(1, 2)


class Perceptron(nn.Module):
    """Two linear layers with GELU and dropout between them."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.wide, self.dropout, self.out = nn.Linear(width, hidden), nn.Dropout(dropout), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.dropout(F.gelu(self.wide(x))))
        return out


class Branch(nn.Module):
    """Adds to its input what a layer makes of it. In training the layer is left out for some images (stochastic depth).

    What is added for the others is divided by their share, so that its mean is the same in training and evaluation.
    """

    def __init__(self, width: int, layer: nn.Module, dropout: float, skip: float) -> None:
        super().__init__()
        self.norm, self.layer, self.dropout, self.skip = nn.LayerNorm(width), layer, nn.Dropout(dropout), skip

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.dropout(self.layer(self.norm(x)))
        if self.training and self.skip:
            added = added * F.dropout(x.new_ones(len(x), 1, 1), self.skip)  # a number per image
        return x + added


class Patches(nn.Module):
    """Cuts images into patches and returns (batch, patches, width): a linear map of each patch plus its position."""

    def __init__(self, shape: tuple[int, ...], patch: int, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(shape[0], width, patch, stride=patch)
        self.positions = nn.Parameter(torch.zeros((shape[1] // patch) * (shape[2] // patch), width))

    def forward(self, x: Tensor) -> Tensor:
        # In one order in memory with every engine, because dropout draws its random numbers in that order.
        patches: Tensor = self.conv(x).flatten(2).transpose(1, 2).contiguous()
        return patches + self.positions


class Mean(nn.Module):
    """The mean over all patches."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def vit(
    shape: tuple[int, ...],
    *,
    width: Annotated[int, Option("channels of a patch, a multiple of the attention heads", low=1)] = 192,
    depth: Annotated[int, Option("blocks of attention and a perceptron", low=1)] = 6,
    attention_heads: Annotated[int, Option("heads of every attention", low=1)] = 4,
    patch: Annotated[int, Option("height and width of a patch in pixels", low=1)] = 4,
    mlp_ratio: Annotated[int, Option("hidden units of a perceptron, as a multiple of the width", low=1)] = 4,
    dropout: Annotated[
        float, Option("share of the activations dropped after every layer with weights", low=0, high=0.99)
    ] = 0.1,
    stochastic_depth: Annotated[
        float, Option("share of the images that skip a branch of the last block; less in front of it", low=0, high=0.99)
    ] = 0.1,
) -> nn.Sequential:
    """Vision transformer: patches of 4x4, learned positions, 6 pre-norm blocks of 4 heads; the mean of 192 channels."""
    check(vit, locals())
    if len(shape) != 3 or min(shape[1:]) < patch or shape[1] % patch or shape[2] % patch:
        needs = f"whose height and width are multiples of {patch}, the size of a patch"
        raise ValueError(f"vit needs images {needs}, not {shape}; the network mlp takes any inputs")
    if width % attention_heads:
        raise ValueError(
            f"width must be a multiple of attention_heads: {width} channels can't be divided among {attention_heads}"
        )
    blocks = nn.Sequential()
    for number in range(1, depth + 1):
        skip = stochastic_depth * number / depth  # grows from block to block, as in https://arxiv.org/abs/1603.09382
        attention, perceptron = Attention(width, attention_heads), Perceptron(width, mlp_ratio * width, dropout)
        blocks.append(nn.Sequential(*(Branch(width, layer, dropout, skip) for layer in (attention, perceptron))))
    trunk = nn.Sequential(Patches(shape, patch, width), nn.Dropout(dropout), blocks, nn.LayerNorm(width), Mean())
    for name, parameter in trunk.named_parameters():
        if name.endswith(".bias"):
            nn.init.zeros_(parameter)
        elif parameter.dim() > 1:
            nn.init.trunc_normal_(parameter, std=SCALE)
    return trunk
