"""From raw images to what the network sees: a map of pixels, then normalisation; and random crops."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


def scaled(x: Tensor) -> Tensor:
    """Return images as float; uint8 is scaled from [0, 255] to [0, 1]."""
    return x.float().div_(255) if x.dtype == torch.uint8 else x.float()


@dataclass(frozen=True)
class Transform:
    """Turns raw images into what the network sees: pixel i is raw pixel pixels[i], then (value - mean) / std.

    Permutations, rotations, padding and gray-to-colour are all such maps of pixels, so a task never copies the data it is
    made of. Each table has one row, or one row per task for a split that mixes tasks.

    Attributes:
        shape: the shape of one image as the network sees it.
        mean: (rows, channels), in the units of the raw images; of uint8, which is divided by 255, in those of 0 to 1.
        std: (rows, channels), in the same units.
        pixels: (rows, pixels), int64, where -1 is a blank; None keeps the pixels where they are.
    """

    shape: tuple[int, ...]
    mean: Tensor
    std: Tensor
    pixels: Tensor | None = None

    def __call__(self, raw: Tensor, row: Tensor | None = None, crops: Tensor | None = None) -> Tensor:
        """Return the images (batch, *shape) that the network sees.

        Args:
            raw: raw images, in any shape that has the right number of values; token ids (int64) are not normalised.
            row: the row of the tables for each example; None takes the first for all.
            crops: random crops to apply before normalisation, see `draw_crops`.
        """
        x = self.move_pixels(raw, row)
        if x.dtype == torch.int64:  # token ids
            return x
        x = scaled(x)
        if crops is not None:
            x = crop_and_flip(x, crops)
        mean, std = (t[row] if row is not None else t for t in (self.mean, self.std))
        dims = (-1, mean.shape[1]) + (1,) * (len(self.shape) - 1)
        return x.sub(mean.view(dims)).div_(std.view(dims))

    def move_pixels(self, raw: Tensor, row: Tensor | None = None) -> Tensor:
        """Return raw images (batch, *shape) whose pixels are where the network sees them, without normalisation."""
        x = raw.flatten(1)
        if self.pixels is not None:
            pixels = self.pixels[0] if row is None else self.pixels[row]
            index = pixels.clamp(min=0)
            x = (x.index_select(1, index) if row is None else x.gather(1, index)).masked_fill(pixels < 0, 0)
        return x.reshape(len(x), *self.shape)


MARGIN = 4  # the pixels by which a crop may be off the centre


def draw_crops(count: int, source: torch.Generator) -> Tensor:
    """Draw for every image how far down and right it is moved, and whether it is mirrored; (count, 3), int64."""
    moves = torch.randint(0, 2 * MARGIN + 1, (count, 2), generator=source)
    return torch.cat([moves, torch.randint(0, 2, (count, 1), generator=source)], 1)


def crop_and_flip(x: Tensor, crops: Tensor) -> Tensor:
    """Move every image by up to MARGIN pixels each way (blank beyond the edge) and mirror some of them."""
    count, _, height, width = x.shape
    down, right, mirrored = crops[:, :, None].unbind(1)  # (count, 1) each
    rows = torch.arange(height, device=x.device) + down  # (count, height)
    columns = torch.arange(width, device=x.device).expand(count, -1)
    columns = torch.where(mirrored > 0, columns.flip(1), columns) + right
    padded = F.pad(x, (MARGIN,) * 4).permute(0, 2, 3, 1)
    every = torch.arange(count, device=x.device)[:, None, None]
    return padded[every, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
