"""How the raw images of every task become what the network sees, kept with the network for images that come later."""

import math
import re

import torch
from torch import Tensor, nn

from hatrack.tasks.split import TaskId
from hatrack.tasks.transform import Transform


class Preprocessing(nn.Module):
    """A table of transforms, one row per task.

    Args:
        shape: of one image as the network sees it.
        device: where the tables lie.
    """

    mean: Tensor
    std: Tensor
    pixels: Tensor
    raw: Tensor  # how many values a raw image of each task has

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("mean", torch.zeros(0, shape[0] if len(shape) == 3 else 1, device=device))
        self.register_buffer("std", torch.ones_like(self.mean))
        self.register_buffer("pixels", torch.zeros(0, math.prod(shape), dtype=torch.int64, device=device))
        self.register_buffer("raw", torch.zeros(0, dtype=torch.int64, device=device))

    def add_task(self) -> None:
        """One more row: images are taken as they are."""
        self.mean = torch.cat([self.mean, self.mean.new_zeros(1, self.mean.shape[1])])
        self.std = torch.cat([self.std, self.std.new_ones(1, self.std.shape[1])])
        self.pixels = torch.cat([self.pixels, torch.arange(self.pixels.shape[1], device=self.pixels.device)[None]])
        self.raw = torch.cat([self.raw, self.raw.new_full((1,), self.pixels.shape[1])])

    def set(self, task: int, transform: Transform, values: int) -> None:
        """Set a task's row from the transform of its data, whose raw images have so many values each."""
        self.raw[task] = values
        self.mean[task], self.std[task] = transform.mean[0], transform.std[0]
        plain = torch.arange(self.pixels.shape[1], device=self.pixels.device)
        self.pixels[task] = plain if transform.pixels is None else transform.pixels[0]

    def rows(self, task: int) -> dict[str, Tensor]:
        """A task's row of every table."""
        return {name: self.get_buffer(name)[task] for name in ("mean", "std", "pixels", "raw")}

    def forward(self, images: Tensor, task: TaskId) -> Tensor:
        """Raw images (uint8, or float in the units of the task's own data) as the network sees them."""
        row = torch.full((len(images),), task, device=images.device) if isinstance(task, int) else task
        size, own = math.prod(images.shape[1:]), self.raw[row]
        if not (own == size).all():
            wanted = int(own[own != size][0])
            raise ValueError(
                f"raw images of this task have {wanted} values each, not {size} (shape {tuple(images.shape[1:])})"
            )
        given = tuple(images.shape[1:])
        if len(given) == len(self.shape) and size == math.prod(self.shape) and given != self.shape:
            raise ValueError(f"images are of shape {given}, but the network takes {self.shape}")
        return Transform(self.shape, self.mean, self.std, self.pixels)(images, row)


def current_name(name: str) -> str:
    """The present name of a tensor in a saved file: in files of version 0.1 these tables are the network's own."""
    return re.sub(r"^(method/|best/|state\.)?net\.(mean|std|pixels|raw)$", r"\1net.preprocessing.\2", name)
