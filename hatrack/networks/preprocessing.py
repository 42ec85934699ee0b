"""What turns raw images into what the network sees: the example it is built with, and a table of transforms per task."""

import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hatrack.tasks.arrays import as_tensor, channels_first
from hatrack.tasks.split import TaskId, task_ids
from hatrack.tasks.task import Task
from hatrack.tasks.transform import Transform, scaled

FAR = 50.0  # a standard deviation that no images have which are scaled to [0, 1]


def as_example(images: Any) -> Tensor:
    """Return images as the example of a network: bytes (uint8) channels first and scaled to [0, 1], others as they are."""
    example = as_tensor("the example must be images", images)
    if not example.isfinite().all():  # all answers on it would be NaN, and NaN equals NaN whatever the trunk computes
        raise ValueError("the example holds values that are NaN or infinite")
    return scaled(channels_first("the example", example)) if example.dtype == torch.uint8 else example


def as_raw(images: Any, example: Tensor) -> Tensor:
    """Return raw images as a tensor on the device of the example, channels first."""
    raw = as_tensor("images must be numbers", images).to(example.device)
    return raw if raw.shape[1:] == example.shape[1:] else channels_first("images", raw)


def classes_and_example(classes: Sequence[int] | None, example: Any, tasks: Any) -> tuple[list[int], Tensor]:
    """Return the classes and the example that a network is built for, given either as they are or as tasks."""
    if tasks is None:
        if classes is None or example is None:
            raise ValueError(
                "a network needs tasks=tasks, or classes and an example: Network(trunk, [10, 43], example=x[:2])"
            )
        if not len(as_tensor("the example must be images", example).reshape(-1)):
            raise ValueError("the example has no images: one or more are needed, such as x[:2]")
        if isinstance(classes, int):
            raise ValueError(f"classes are a list, of one number per task, such as [{classes}], not {classes}")
        return list(classes), as_example(example)
    if classes is not None or example is not None:
        raise ValueError("a network takes classes and an example from the tasks: give either tasks or these two, not both")
    if not isinstance(tasks, Sequence) or not tasks or not all(isinstance(task, Task) for task in tasks):
        raise ValueError(f"tasks must be a list of one Task or more, not {tasks!r}")
    ordered = sorted(tasks, key=lambda task: task.index)
    if [task.index for task in ordered] != list(range(len(ordered))):
        raise ValueError(f"the numbers of the tasks must be 0 to {len(ordered) - 1}, not {[task.index for task in tasks]}")
    first = ordered[0]
    for task in ordered:
        if task.shape != first.shape:
            raise ValueError(f"task {task.name!r} has images of shape {task.shape}, but {first.name!r} of {first.shape}")
    some = torch.arange(min(2, len(first.train)), device=first.train.y.device)
    return [task.classes for task in ordered], first.train.inputs(some)


class Preprocessing(nn.Module):
    """A table of transforms, one row per task.

    Args:
        shape: the shape of one image as the network sees it.
        device: the device of the tables.
        tokens: the inputs are token ids, which are not normalised.
    """

    mean: Tensor
    std: Tensor
    pixels: Tensor
    raw: Tensor  # how many values a raw image of each task has

    def __init__(self, shape: tuple[int, ...], device: torch.device, *, tokens: bool = False) -> None:
        super().__init__()
        self.shape, self.tokens = shape, tokens
        self.register_buffer("mean", torch.zeros(0, shape[0] if len(shape) == 3 else 1, device=device, dtype=torch.float32))
        self.register_buffer("std", torch.ones_like(self.mean))
        self.register_buffer("pixels", torch.zeros(0, math.prod(shape), dtype=torch.int64, device=device))
        self.register_buffer("raw", torch.zeros(0, dtype=torch.int64, device=device))

    def add_task(self) -> None:
        """Add a row for one more task, whose images are taken as they are until `set` says otherwise."""
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

    def reset(self, task: int) -> None:
        """Set a task's row to what it was before `set`: images are taken as they are."""
        self.mean[task], self.std[task], self.raw[task] = 0, 1, self.pixels.shape[1]
        self.pixels[task] = torch.arange(self.pixels.shape[1], device=self.pixels.device)

    def rows(self, task: int) -> dict[str, Tensor]:
        """Return a task's row of every table."""
        return {name: self.get_buffer(name)[task] for name in ("mean", "std", "pixels", "raw")}

    def forward(self, images: Tensor, task: TaskId) -> Tensor:
        """Return what the network sees of raw images (uint8, or float in the units of the task's own data)."""
        row = (
            torch.full((len(images),), task, device=images.device)
            if isinstance(task, int)
            else task_ids(task, len(images), len(self.raw))
        )
        size, own = math.prod(images.shape[1:]), self.raw[row]
        if not (own == size).all():
            wanted = int(own[own != size][0])
            raise ValueError(
                f"raw images of this task have {wanted} values each, not {size} (shape {tuple(images.shape[1:])})"
            )
        given = tuple(images.shape[1:])
        if len(given) == len(self.shape) and size == math.prod(self.shape) and given != self.shape:
            raise ValueError(f"images are of shape {given}, but the network takes {self.shape}")
        if images.dtype == torch.uint8 and ((self.mean[row] > 1) | (self.std[row] > FAR)).any():  # (images, channels)
            raise ValueError(
                "images are bytes (uint8), but this task was learned from floats in other units: give such floats"
            )
        return Transform(self.shape, self.mean, self.std, self.pixels)(self.in_kind(images), row)

    def in_kind(self, images: Tensor) -> Tensor:
        """Return raw images as bytes or floats, and token ids as int64."""
        if self.tokens:
            return images.long()
        return images if images.dtype == torch.uint8 else images.float()


def current_name(name: str) -> str:
    """Return the present name of a tensor in a saved file: in files of version 0.1 these tables are the network's own, and
    the masks of PMASK have another name."""
    name = re.sub(r"^(method/|best/|state\.)?masks$", r"\1packed_masks", name)
    return re.sub(r"^(method/|best/|state\.)?net\.(mean|std|pixels|raw)$", r"\1net.preprocessing.\2", name)
