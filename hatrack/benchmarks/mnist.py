"""Benchmarks of MNIST's handwritten digits: with permuted pixels, rotated, or split by labels."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from hatrack.datasets import sources
from hatrack.datasets.sources import Data, Source, Valid
from hatrack.options import Option, check
from hatrack.seeds import derive
from hatrack.tasks.arrays import normalisation
from hatrack.tasks.task import Task
from hatrack.tasks.transform import Transform

SHAPE = (1, 28, 28)
MEAN, STD = 0.1307, 0.3081  # of the MNIST training set
Tasks = Annotated[int, Option("how many tasks", low=1, high=1000)]
First = Annotated[Literal["permuted", "plain"], Option("the first task: permuted as in 001, or plain as in 002 and 004")]
Permutations = Annotated[
    Literal["seed", "prefix", "fresh"],
    Option(
        "from the seed and the number of tasks, as in 001's code; prefix: each from the seed and its own number alone, so "
        "that a run can be extended; fresh: new ones every time, as in 004's code: such a run can't be repeated"
    ),
]
Normalise = Annotated[
    bool, Option("subtract MNIST's mean and divide by its standard deviation, as in 001; 002 and 004: pixels / 255")
]
ValidateOn = Annotated[
    Literal["held-out", "train"],
    Option("validate on the held-out share; or, as in 001's code, on the training set itself, with nothing held out"),
]


def pmnist(
    seed: int = 0,
    *,
    data: Data = "full",
    tasks: Tasks = 10,
    first: First = "permuted",
    permutations: Permutations = "seed",
    normalise: Normalise = True,
    valid: Valid = 0.15,
    validate_on: ValidateOn = "held-out",
) -> list[Task]:
    """Permuted MNIST: every task shows the same digits with its pixels in another order (001, ten tasks).

    002 is `--tasks 5 --first plain --no-normalise --valid 0`; 004 is the same with `--tasks 20`.
    The permutations of a seed are those of 001's code when no files of another seed are there that it would reuse.
    """
    check(pmnist, locals())
    maps = _permutations(seed, tasks, math.prod(SHAPE), first, permutations)
    held = valid if validate_on == "held-out" else 0.0
    made = _pixel_map_tasks(maps, _names("permuted", tasks, first), data, normalise, held, seed)
    return _with_validation(made, validate_on)


def pmnist_blocks(
    seed: int = 0,
    *,
    data: Data = "full",
    tasks: Tasks = 5,
    first: First = "plain",
    normalise: Normalise = False,
    valid: Valid = 0.0,
    permutations: Annotated[
        Literal["seed", "prefix"],
        Option(
            "drawn from the seed and the number of tasks; prefix: each from the seed and its own number alone, so that a "
            "run can be extended",
            added=True,
        ),
    ] = "seed",
) -> list[Task]:
    """MNIST cut into 16 blocks of 7x7 pixels whose places are permuted (002, proposed for convolutional networks)."""
    check(pmnist_blocks, locals())
    maps = [block_map(order, SHAPE[1]) for order in _permutations(seed, tasks, 16, first, permutations)]
    return _pixel_map_tasks(maps, _names("blocks", tasks, first), data, normalise, valid, seed)


def rmnist(
    seed: int = 0,
    *,
    data: Data = "full",
    tasks: Tasks = 20,
    step: Annotated[
        float,
        Option("degrees from one task to the next; 0: 180 / tasks, as in the code of 004's baselines", low=0, high=360),
    ] = 10.0,
    normalise: Normalise = False,
    valid: Valid = 0.0,
) -> list[Task]:
    """Rotated MNIST (004): task k, from 0, is turned by k steps less a random part of one step."""
    check(rmnist, locals())
    step = step or 180 / tasks
    angles = np.arange(tasks) * step - np.random.RandomState(seed).uniform(0, step, tasks)
    maps = [rotation_map(angle, SHAPE[1]) for angle in angles]
    names = [f"turned by {angle:.1f}" for angle in angles]
    return _pixel_map_tasks(maps, names, data, normalise, valid, seed)


def smnist(
    seed: int = 0,
    *,
    data: Data = "full",
    tasks: Annotated[Literal[2, 5], Option("two halves (0-4, 5-9: 001) or five pairs")] = 2,
    valid: Valid = 0.15,
    validate_on: ValidateOn = "held-out",
    normalise: Annotated[
        bool, Option("subtract MNIST's mean and divide by its standard deviation, or pixels / 255", added=True)
    ] = True,
    order: Annotated[
        Literal["digits", "seed"], Option("0, 1, 2, ...; or an order of the digits drawn from the seed", added=True)
    ] = "digits",
) -> list[Task]:
    """Split MNIST: the digits in order, as two tasks of five (001) or five tasks of two."""
    check(smnist, locals())
    source = sources.load("mnist", data)
    transform = normalisation(SHAPE, MEAN, STD) if normalise else normalisation(SHAPE, 0.0, 1.0)
    held = valid if validate_on == "held-out" else 0.0
    digits = np.random.RandomState(seed).permutation(10).tolist() if order == "seed" else list(range(10))
    made = []
    for k, places in enumerate(consecutive_labels(10, 10 // tasks)):
        group = [digits[place] for place in places]
        name = f"digits {group[0]}-{group[-1]}" if order == "digits" else f"digits {', '.join(map(str, group))}"
        made.append(labels_as_task(source, group, k, name, transform, held, seed))
    return _with_validation(made, validate_on)


def consecutive_labels(classes: int, each: int) -> list[range]:
    """Return the labels 0, 1, 2, ... in groups of `each`."""
    return [range(low, low + each) for low in range(0, classes, each)]


def labels_as_task(
    source: Source, labels: Sequence[int], index: int, name: str, transform: Transform, valid: float, seed: int
) -> Task:
    """Return the images of some classes as one task; no image is copied.

    Args:
        source: the data set.
        labels: the classes; in the task, they have the labels 0, 1, 2, ... in this order.
        index: the number of the task.
        name: the name of the task.
        transform: how the network sees the images.
        valid: the share of the training images that is held out for validation.
        seed: the seed that chooses them.
    """
    new = torch.full((source.classes,), -1)
    new[list(labels)] = torch.arange(len(labels))
    parts, rows = [], []
    for x, y in (source.train, source.test):
        keep = (new[y] >= 0).nonzero().flatten()
        parts.append((x, new[y[keep]]))
        rows.append(keep)
    return Task.build(
        index, name, len(labels), parts[0], parts[1], transform, valid=valid, seed=seed, keep=(rows[0], rows[1])
    )


def block_map(order: Tensor, size: int) -> Tensor:
    """Return the pixel map that puts block order[i] of a square image where block i was.

    Args:
        order: (blocks,), a permutation; blocks are counted row by row.
        size: the height and width of the image.

    Returns:
        (size * size,), for every pixel the pixel whose value it gets.
    """
    count = math.isqrt(len(order))
    side = size // count
    pixels = torch.arange(size * size).reshape(count, side, count, side).transpose(1, 2).reshape(-1, side, side)
    return pixels[order].reshape(count, count, side, side).transpose(1, 2).flatten()


def rotation_map(degrees: float, size: int) -> Tensor:
    """Return the pixel map that rotates a square image anticlockwise about its centre, by the nearest pixel.

    Args:
        degrees: the angle.
        size: the height and width of the image.

    Returns:
        (size * size,), for every pixel the pixel whose value it gets; -1 for the corners, which are blank.
    """
    angle, centre = math.radians(degrees), (size - 1) / 2
    y, x = torch.meshgrid(torch.arange(size) - centre, torch.arange(size) - centre, indexing="ij")
    from_x = (math.cos(angle) * x - math.sin(angle) * y + centre).round().long()
    from_y = (math.sin(angle) * x + math.cos(angle) * y + centre).round().long()
    inside = (from_x >= 0) & (from_x < size) & (from_y >= 0) & (from_y < size)
    return torch.where(inside, from_y * size + from_x, -1).flatten()


def _permutations(seed: int, tasks: int, length: int, first: str, permutations: str = "seed") -> list[Tensor]:
    """Return a permutation per task; as in 001's code, task k has the seed r_k * 100 + k, with r a shuffle of the tasks.

    With "prefix" the permutation of task k is drawn from the seed and k alone, whatever the number of tasks.
    """
    numbers = np.arange(tasks)
    np.random.RandomState(seed).shuffle(numbers)
    draws = [np.random.RandomState(int(r) * max(100, tasks) + k) for k, r in enumerate(numbers)]
    if permutations == "fresh":
        draws = [np.random.RandomState() for _ in numbers]
    elif permutations == "prefix":
        draws = [np.random.RandomState(derive(seed, "permutation", k) % 2**32) for k in range(tasks)]
    orders = [torch.from_numpy(draw.permutation(length)) for draw in draws]
    return [torch.arange(length), *orders[1:]] if first == "plain" else orders


def _names(kind: str, tasks: int, first: str) -> list[str]:
    """Return the names of the tasks: "plain" for a plain first task, otherwise the kind and a number."""
    return ["plain" if first == "plain" and k == 0 else f"{kind} {k}" for k in range(tasks)]


def _pixel_map_tasks(
    maps: Sequence[Tensor], names: Sequence[str], data: str, normalise: bool, valid: float, seed: int
) -> list[Task]:
    """Return one task per pixel map, each with all images of MNIST; no image is copied."""
    source = sources.load("mnist", data)
    plain = normalisation(SHAPE, MEAN, STD) if normalise else normalisation(SHAPE, 0.0, 1.0)
    made = []
    for k, (pixels, name) in enumerate(zip(maps, names, strict=True)):
        transform = replace(plain, pixels=pixels[None])
        made.append(Task.build(k, name, source.classes, source.train, source.test, transform, valid=valid, seed=seed))
    return made


def _with_validation(tasks: list[Task], on: str) -> list[Task]:
    """Return the tasks, with their training sets as validation sets if `on` is "train"."""
    return [replace(task, valid=task.train) for task in tasks] if on == "train" else tasks
