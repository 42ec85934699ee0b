"""A user's own task sequence: a TOML file that names a data file or an image folder per task.

shape = [3, 32, 32]            # optional: bring every image to this (channels, height, width)

[[task]]
name = "digits"
data = "digits.npz"            # x_train, y_train, x_test, y_test; paths are relative to the TOML file
classes = 10                   # optional: as many as there are labels
mean = [0.5, 0.5, 0.5]         # optional, the two together; otherwise measured on the training images
std = [0.25, 0.25, 0.25]

[[task]]
name = "flowers"
data = "flowers"               # a folder: train/CLASS/*.png and test/CLASS/*.png, or CLASS/*.png
"""

import hashlib
import tomllib
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hatrack.benchmarks.sources import Valid, read_arrays
from hatrack.options import Option, check, nearest
from hatrack.split import scaled
from hatrack.task import Task, store

KEYS: dict[str, Any] = {"name": str, "data": str, "classes": int, "mean": (int, float, list), "std": (int, float, list)}


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
    parts = [_arrays(path, entry) for entry in entries]
    shapes = {entry["name"]: tuple(train[0].shape[1:]) for entry, (train, _) in zip(entries, parts, strict=True)}
    if shape is None and len(set(shapes.values())) > 1:
        said = ", ".join(f"{name} {size}" for name, size in shapes.items())
        raise ValueError(
            f"{path}: the tasks' images differ ({said}); shape = [3, 32, 32] in its first line would make them one"
        )
    made = []
    for index, (entry, (train, test)) in enumerate(zip(entries, parts, strict=True)):
        what = f"{path}, task {entry['name']!r}"
        images = [x if shape is None else to_shape(what, x, shape) for x in (train[0], test[0])]
        how: dict[str, Any] = {"classes": entry.get("classes"), **_normal(images[0], entry)}
        parts_of = (images[0], train[1], images[1], test[1])
        made.append(Task.from_arrays(index, entry["name"], *parts_of, valid=valid, seed=seed, **how))
    return made


def fingerprint(tasks: str) -> str:
    """A digest of the TOML file and of all the data that it names, so that a run on other data is another run."""
    path = Path(tasks)
    if not tasks or not path.is_file():
        return ""
    total = hashlib.sha256(path.read_bytes())
    for entry in _read(path)[1]:
        data = path.parent / entry["data"]
        for file in sorted(p for p in data.rglob("*") if p.is_file()) if data.is_dir() else [data]:
            total.update(entry["data"].encode() + file.name.encode())
            total.update(file.read_bytes() if file.is_file() else b"")
    return total.hexdigest()


def _read(path: Path) -> tuple[tuple[int, ...] | None, list[dict[str, Any]]]:
    """The shape and the tasks that the file names, each key checked."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"can't read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    for key in data:
        if key not in ("shape", "task"):
            raise ValueError(f"{path}: no key {key!r}; {nearest(key, ('shape', 'task'))}")
    entries = data.get("task")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{path} names no tasks; each begins with a line [[task]]")
    for number, entry in enumerate(entries):
        _check(f"{path}, task {number + 1}", entry)
    shape = data.get("shape")
    whole = isinstance(shape, list) and len(shape) == 3 and all(type(size) is int and size > 0 for size in shape)
    if shape is not None and not whole:
        raise ValueError(f"{path}: shape must be three whole numbers, channels, height and width, not {shape!r}")
    return (None if shape is None else tuple(shape)), entries


def _check(what: str, entry: dict[str, Any]) -> None:
    for key, value in entry.items():
        if key not in KEYS:
            raise ValueError(f"{what}: no key {key!r}; {nearest(key, KEYS)}")
        if not isinstance(value, KEYS[key]) or isinstance(value, bool):
            raise ValueError(f"{what}: {key} = {value!r} is not what it should be")
    for key in ("name", "data"):
        if key not in entry:
            raise ValueError(f"{what}: {key} is missing")
    if ("mean" in entry) != ("std" in entry):
        raise ValueError(f"{what}: mean and std come together")


def _arrays(path: Path, entry: dict[str, Any]) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    data = path.parent / entry["data"]
    arrays = read_arrays(data)
    parts = [store(f"{data}, {split}", arrays[f"x_{split}"], arrays[f"y_{split}"]) for split in ("train", "test")]
    return parts[0], parts[1]


def to_shape(what: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Images resized (bilinear) and gray ones made colour; colour to gray would lose something and is refused."""
    if x.dim() != 4:
        raise ValueError(f"{what}: vectors of {tuple(x.shape[1:])} can't be brought to images of {shape}")
    if x.shape[1] != shape[0] and x.shape[1] != 1:
        raise ValueError(f"{what}: its images have {x.shape[1]} channels and can't be brought to {shape[0]}")
    if x.shape[2:] != shape[1:]:
        parts = [F.interpolate(p.float(), size=shape[1:], mode="bilinear", antialias=True) for p in torch.split(x, 1000)]
        resized = torch.cat([p.round().clamp(0, 255).to(torch.uint8) if x.dtype == torch.uint8 else p for p in parts])
        x = resized
    return x.expand(-1, shape[0], -1, -1).contiguous()


def _normal(x: Tensor, entry: dict[str, Any]) -> dict[str, Any]:
    """The mean and standard deviation that the file gives, or those of the training images, per channel."""
    if "mean" in entry:
        return {"mean": entry["mean"], "std": entry["std"]}
    dims = (0, 2, 3) if x.dim() == 4 else (0, 1)
    values = scaled(x).double()
    return {"mean": values.mean(dims).float().tolist(), "std": values.std(dims).clamp(min=1e-3).float().tolist()}
