"""The benchmark `own`: a user's tasks, from a TOML file that names a data file or an image folder per task.

shape = [3, 32, 32]            # optional: resize all images to these channels, height and width

[[task]]
name = "digits"
data = "digits.npz"            # x_train, y_train, x_test, y_test; paths are relative to the TOML file
classes = 10                   # optional; otherwise the largest label + 1
mean = [0.5, 0.5, 0.5]         # optional, both or none; otherwise measured on the training images
std = [0.25, 0.25, 0.25]
scale = 255                    # optional, for numbers that are not bytes: they are divided by it before mean and std
target = "classes"             # optional: or "multi-label", "regression", "ordinal"
class_weights = "balanced"     # optional: or a number per class

[[task]]
name = "flowers"
data = "flowers"               # a folder: train/CLASS/*.png and test/CLASS/*.png, or CLASS/*.png
"""

import math
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hatrack.benchmarks.task_file import errors_name, read_task_file
from hatrack.datasets.cache import empty
from hatrack.datasets.sources import Valid, read_arrays
from hatrack.files.limits import IMAGE
from hatrack.options import Option, check
from hatrack.tasks.arrays import as_tensor, to_inputs
from hatrack.tasks.task import Task
from hatrack.tasks.transform import scaled


def own(
    seed: int = 0,
    *,
    tasks: Annotated[str, Option("a TOML file that names a .npz file or an image folder per task")] = "",
    valid: Valid = 0.15,
) -> list[Task]:
    """Tasks of your own, from a TOML file: --tasks FILE.toml names a .npz file or an image folder per task."""
    check(own, locals())
    if not tasks:
        raise ValueError(
            "the benchmark 'own' needs --tasks FILE.toml, a file that names a .npz file or image folder per task"
        )
    path = Path(tasks)
    shape, entries = read_task_file(path)
    parts = [_read_data(path, entry) for entry in entries]
    shapes = [tuple(train[0].shape[1:]) for train, _ in parts]
    if shape is None and len(set(shapes)) > 1:
        found = ", ".join(f"{entry['name']} {size}" for entry, size in zip(entries, shapes, strict=True))
        raise ValueError(
            f"{path}: the tasks have images of different shapes ({found}); a first line such as shape = [3, 32, 32] resizes "
            "them all"
        )
    made = []
    for index, (entry, (train, test)) in enumerate(zip(entries, parts, strict=True)):
        with errors_name(path, entry):
            images = [x if shape is None else resize_images(x, shape) for x in (train[0], test[0])]
            options: dict[str, Any] = {key: entry[key] for key in ("classes", "target", "class_weights") if key in entry}
            options |= _mean_and_std(images[0], entry)
            arrays = (images[0], train[1], images[1], test[1])
            made.append(Task.from_arrays(index, entry["name"], *arrays, valid=valid, seed=seed, **options))
    return made


def _read_data(path: Path, entry: dict[str, Any]) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Read the images and labels of a task, for training and test."""
    data = path.parent / entry["data"]
    with errors_name(path, entry):
        arrays = read_arrays(data)
        train, test = (
            (
                to_inputs(f"{data}, {split}", arrays[f"x_{split}"], arrays[f"y_{split}"]),
                as_tensor(str(data), arrays[f"y_{split}"]),
            )
            for split in ("train", "test")
        )
    return train, test


def resize_images(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Resize images (bilinear, with antialiasing), and repeat gray ones on all channels.

    Args:
        x: (n, channels, height, width), uint8 or float.
        shape: the new channels, height and width.

    Returns:
        The images in the same data type. It raises a ValueError for vectors, and for colour images if `shape` is gray,
        because the conversion would lose information.
    """
    if x.dim() != 4:
        raise ValueError(f"vectors of shape {tuple(x.shape[1:])} can't be resized to images of shape {shape}")
    if x.shape[1] != shape[0] and x.shape[1] != 1:
        raise ValueError(f"its images have {x.shape[1]} channels and can't be converted to {shape[0]}")
    result = torch.from_numpy(empty("its images", (len(x), *shape), np.uint8 if x.dtype == torch.uint8 else np.float32))
    batch = max(1, IMAGE // math.prod(shape))  # so that not all images are in float32 at the same time
    for start in range(0, len(x), batch):
        part = x[start : start + batch]
        if part.shape[2:] != shape[1:]:
            part = F.interpolate(part.float(), size=shape[1:], mode="bilinear", antialias=True)
            part = part.round().clamp(0, 255).to(torch.uint8) if x.dtype == torch.uint8 else part
        result[start : start + batch] = part.expand(-1, shape[0], -1, -1)
    return result


def _mean_and_std(x: Tensor, entry: dict[str, Any]) -> dict[str, Any]:
    """Return the mean, standard deviation and scale that the file gives, or measure the first two per channel.

    Where they are measured, they are in the units of the images, whatever these are: floats need not state their scale.
    """
    if "mean" in entry:
        return {"mean": entry["mean"], "std": entry["std"], "scale": entry.get("scale")}
    floats = x.dtype != torch.uint8
    unit: float = entry.get("scale", 1.0) if floats else 1.0
    dims = (0, 2, 3) if x.dim() == 4 else (0, 1)
    batch = max(1, IMAGE // x[0].numel())  # so that not all images are in float64 at the same time
    parts = range(0, len(x), batch)
    count = x.numel() // (x.shape[1] if x.dim() == 4 else 1)
    mean = sum((scaled(x[k : k + batch]).double().sum(dims, keepdim=True) for k in parts), torch.zeros(1)) / count
    square = sum(((scaled(x[k : k + batch]).double() - mean).square().sum(dims) for k in parts), torch.zeros(1))
    std = (square / max(1, count - 1)).sqrt()
    found = {"mean": mean / unit, "std": std.clamp(min=1e-3) / unit}
    return {
        **{name: value.flatten().float().tolist() for name, value in found.items()},
        "scale": unit if floats else entry.get("scale"),
    }
