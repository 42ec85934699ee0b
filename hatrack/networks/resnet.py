"""Residual networks for small images (He, Zhang, Ren, Sun, 2015), https://arxiv.org/abs/1512.03385

The first convolution is 3x3 and there is no pooling before the end, as is usual for 32x32 images; 000 uses this resnet18.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from hatrack.options import Option, check

Width = Annotated[int, Option("channels of the first stage; the others have 2, 4 and 8 times as many", low=1)]
Share = Annotated[float, Option("share of the activations dropped in every block", low=0, high=0.99)]
Kind = Annotated[
    Literal["standard", "authors"], Option("two convolutions per block, or the only one that the code of 004 calls")
]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with dropout between them; the input is added to the result."""

    expansion = 1  # output channels / width

    def __init__(self, inputs: int, width: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.conv1, self.norm1 = conv3x3(inputs, width, stride), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = conv3x3(width, width), nn.BatchNorm2d(width)
        self.dropout = nn.Dropout(dropout)
        self.shortcut = shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(F.relu(self.norm1(self.conv1(x))))
        return F.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1x1 to fewer channels, 3x3, 1x1 to four times as many; the stride is that of the 3x3 convolution."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, dropout: float) -> None:
        super().__init__()
        outputs = self.expansion * width
        self.conv1, self.norm1 = conv1x1(inputs, width), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = conv3x3(width, width, stride), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = conv1x1(width, outputs), nn.BatchNorm2d(outputs)
        self.dropout = nn.Dropout(dropout)
        self.shortcut = shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        h = self.dropout(F.relu(self.norm2(self.conv2(h))))
        return F.relu(self.norm3(self.conv3(h)) + self.shortcut(x))


class AuthorsBlock(nn.Module):
    """The block of 004's code: one convolution, norms after the ReLUs, a shortcut without a norm.

    That code has a second convolution, which its forward pass never calls; it is left out here.
    """

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.conv = conv3x3(inputs, width, stride)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.dropout = nn.Dropout(dropout)
        same = stride == 1 and inputs == width
        self.shortcut: nn.Module = nn.Identity() if same else conv1x1(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(self.norm1(F.relu(self.conv(x))))
        out: Tensor = self.dropout(self.norm2(F.relu(h + self.shortcut(x))))
        return out


def conv3x3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    """Return a 3x3 convolution with padding and without bias."""
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)


def conv1x1(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    """Return a 1x1 convolution without bias."""
    return nn.Conv2d(inputs, outputs, 1, stride, bias=False)


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Return the identity if the block keeps the shape of its input; otherwise a 1x1 convolution and a norm."""
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(conv1x1(inputs, outputs, stride), nn.BatchNorm2d(outputs))


Block = type[BasicBlock] | type[Bottleneck] | type[AuthorsBlock]


def resnet(shape: tuple[int, ...], block: Block, blocks: Sequence[int], width: int, dropout: float) -> nn.Sequential:
    """Return a first convolution, stages of blocks, and a global mean. Every stage but the first halves the image.

    Args:
        shape: (channels, height, width) of the images.
        block: the kind of block.
        blocks: the number of blocks of every stage.
        width: the channels of the first stage; each further stage has twice as many.
        dropout: the share of the activations that is dropped in every block.
    """
    if len(shape) != 3 or min(shape[1:]) < 8:
        raise ValueError(f"a resnet needs images of at least 8x8 pixels, not {shape}; the network mlp takes any inputs")
    parts: list[nn.Module] = [nn.Sequential(conv3x3(shape[0], width), nn.BatchNorm2d(width), nn.ReLU())]
    inputs = width
    for stage, count in enumerate(blocks):
        row = []
        for number in range(count):
            row.append(block(inputs, width * 2**stage, 2 if stage and not number else 1, dropout))
            inputs = width * 2**stage * block.expansion
        parts.append(nn.Sequential(*row))
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def resnet18(shape: tuple[int, ...], *, width: Width = 64, dropout: Share = 0.0, block: Kind = "standard") -> nn.Sequential:
    """Residual network of 8 blocks: 20 convolutions, each with batch normalisation; 512 features."""
    check(resnet18, locals())
    return resnet(shape, BasicBlock if block == "standard" else AuthorsBlock, (2, 2, 2, 2), width, dropout)


def resnet34(shape: tuple[int, ...], *, width: Width = 64, dropout: Share = 0.0) -> nn.Sequential:
    """Residual network of 16 blocks: 36 convolutions, each with batch normalisation; 512 features."""
    check(resnet34, locals())
    return resnet(shape, BasicBlock, (3, 4, 6, 3), width, dropout)


def resnet50(shape: tuple[int, ...], *, width: Width = 64, dropout: Share = 0.0) -> nn.Sequential:
    """Residual network of 16 bottlenecks: 53 convolutions, each with batch normalisation; 2048 features."""
    check(resnet50, locals())
    return resnet(shape, Bottleneck, (3, 4, 6, 3), width, dropout)
