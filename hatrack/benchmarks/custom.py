"""The benchmark `own`: a user's tasks, from a TOML file that names a data file or an image folder per task.

shape = [3, 32, 32]            # optional: resize all images to these channels, height and width

[[task]]
name = "digits"
data = "digits.npz"            # x_train, y_train, x_test, y_test; paths are relative to the TOML file
classes = 10                   # optional; otherwise the largest label + 1
mean = [0.5, 0.5, 0.5]         # optional, both or none; otherwise measured on the training images
std = [0.25, 0.25, 0.25]
scale = 255                    # optional, for numbers that are not bytes: they are divided by it before mean and std

[[task]]
name = "flowers"
data = "flowers"               # a folder: train/CLASS/*.png and test/CLASS/*.png, or CLASS/*.png
"""

import hashlib
import math
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hatrack.datasets.cache import empty
from hatrack.datasets.images import image_files
from hatrack.datasets.sources import Valid, read_arrays
from hatrack.files import schema
from hatrack.files.atomic import read_bytes
from hatrack.options import Option, check, nearest
from hatrack.tasks.arrays import to_tensors
from hatrack.tasks.task import Task
from hatrack.tasks.transform import scaled

LARGEST = 2**22  # the largest number of values of an image


def _numbers(where: str, value: Any) -> None:
    """Check for one number, or a list of one per channel."""
    one = schema.number(-1e30, 1e30)
    (schema.items(one, least=1) if isinstance(value, list) else one)(where, value)


KEYS: dict[str, schema.Check] = {
    "name": schema.line,
    "data": schema.line,
    "classes": schema.number(1, 2**31, whole=True),
    "mean": _numbers,
    "std": _numbers,
    "scale": schema.number(1e-30, 1e30),
}


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
    shape, entries = _read(path)
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
        with _errors_name(path, entry):
            images = [x if shape is None else resize_images(x, shape) for x in (train[0], test[0])]
            options: dict[str, Any] = {"classes": entry.get("classes"), **_mean_and_std(images[0], entry)}
            arrays = (images[0], train[1], images[1], test[1])
            made.append(Task.from_arrays(index, entry["name"], *arrays, valid=valid, seed=seed, **options))
    return made


@contextmanager
def _errors_name(path: Path, entry: dict[str, Any]) -> Iterator[None]:
    """Put the names of the file and the task in front of errors."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}, task {entry['name']!r}: {error}") from None


def fingerprint(tasks: str) -> str:
    """Compute a digest of a TOML file and of all data that it names, so that a run on other data has another name.

    Args:
        tasks: the path of the TOML file.

    Returns:
        A SHA-256; "" if there is no such file.
    """
    path = Path(tasks)
    if not tasks or not path.is_file():
        return ""
    total = hashlib.sha256(path.read_bytes())
    for entry in _read(path)[1]:
        with _errors_name(path, entry):
            data = path.parent / entry["data"]
            for file in image_files(data) if data.is_dir() else [data]:
                content = file.read_bytes() if file.is_file() else b""
                name = file.relative_to(data).as_posix()
                total.update(f"{entry['data']} {name} {len(content)}\n".encode())
                total.update(content)
    return total.hexdigest()


def _read(path: Path) -> tuple[tuple[int, ...] | None, list[dict[str, Any]]]:
    """Return the shape and the tasks that the file names, with every key checked."""
    content = read_bytes(path)
    try:
        data = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    for key in data:
        if key not in ("shape", "task"):
            raise ValueError(f"{path}: no key {key!r}; {nearest(key, ('shape', 'task'))}")
    entries = data.get("task")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{path} contains no tasks; each begins with a line [[task]]")
    for number, entry in enumerate(entries):
        _check(f"{path}, task {number + 1}", entry)
    shape = data.get("shape")
    if shape is not None:
        schema.items(schema.number(1, LARGEST, whole=True), 3, what="numbers: channels, height and width")(
            f"{path}: shape", shape
        )
        if math.prod(shape) > LARGEST:
            raise ValueError(f"{path}: shape {shape} has more than {LARGEST:,} values")
    return (None if shape is None else tuple(shape)), entries


def _check(what: str, entry: dict[str, Any]) -> None:
    """Raise if a task has an unknown key, a wrong value, or lacks a key."""
    for key, value in entry.items():
        if key not in KEYS:
            raise ValueError(f"{what}: no key {key!r}; {nearest(key, KEYS)}")
        KEYS[key](f"{what}: {key}", value)
    for key in ("name", "data"):
        if key not in entry:
            raise ValueError(f"{what}: {key} is missing")
    if ("mean" in entry) != ("std" in entry):
        raise ValueError(f"{what}: mean and std must be given together")


def _read_data(path: Path, entry: dict[str, Any]) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Read the images and labels of a task, for training and test."""
    data = path.parent / entry["data"]
    with _errors_name(path, entry):
        arrays = read_arrays(data)
        parts = [to_tensors(f"{data}, {split}", arrays[f"x_{split}"], arrays[f"y_{split}"]) for split in ("train", "test")]
    return parts[0], parts[1]


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
    batch = max(1, LARGEST // math.prod(shape))  # so that not all images are in float32 at the same time
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
    batch = max(1, LARGEST // x[0].numel())  # so that not all images are in float64 at the same time
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
