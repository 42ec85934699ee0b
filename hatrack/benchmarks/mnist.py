"""Task sequences made from one set of handwritten digits: permuted, rotated, split into label groups."""

import math
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from hatrack.benchmarks.sources import Data, Source, Valid, load
from hatrack.options import Option, check
from hatrack.task import Task, View, normal

MEAN, STD = 0.1307, 0.3081  # of the MNIST training set
Tasks = Annotated[int, Option("how many tasks", low=1, high=1000)]


def pmnist(
    seed: int = 0,
    *,
    data: Data = "full",
    tasks: Tasks = 10,
    first: Annotated[
        Literal["permuted", "plain"], Option("the first task: permuted as in 001, or plain as in 002 and 004")
    ] = "permuted",
    valid: Valid = 0.15,
) -> list[Task]:
    """Permuted MNIST: every task shows the same digits with its pixels in another order (ten tasks in 001).

    The permutations are those of the HAT paper's authors, as if no files were cached between seeds.
    """
    check(pmnist, locals())
    source = load("mnist", data)
    ids = np.arange(tasks)
    np.random.RandomState(seed).shuffle(ids)
    order = [np.random.RandomState(int(ids[k]) * max(100, tasks) + k).permutation(784) for k in range(tasks)]
    if first == "plain":
        order[0] = np.arange(784)
    maps = torch.from_numpy(np.stack(order))
    names = ["plain" if first == "plain" and k == 0 else f"permuted {k}" for k in range(tasks)]
    return [seen_through(source, maps[k], k, names[k], valid, seed) for k in range(tasks)]


def rmnist(
    seed: int = 0,
    *,
    data: Data = "full",
    tasks: Tasks = 20,
    step: Annotated[float, Option("degrees from one task to the next", low=0, high=360)] = 10.0,
    valid: Valid = 0.15,
) -> list[Task]:
    """Rotated MNIST (004): task k is turned by k steps less a random part of one step."""
    check(rmnist, locals())
    source = load("mnist", data)
    angles = np.arange(tasks) * step - np.random.RandomState(seed).uniform(0, step, tasks)
    return [seen_through(source, rotation(a, 28), k, f"turned by {a:.1f}", valid, seed) for k, a in enumerate(angles)]


def smnist(
    seed: int = 0,
    *,
    data: Data = "full",
    tasks: Annotated[Literal[2, 5], Option("two halves (0-4, 5-9: 001) or five pairs")] = 2,
    valid: Valid = 0.15,
) -> list[Task]:
    """Split MNIST: the digits in order, as two tasks of five or five tasks of two."""
    check(smnist, locals())
    source = load("mnist", data)
    each = 10 // tasks
    view = normal((1, 28, 28), MEAN, STD)
    groups = [range(k * each, (k + 1) * each) for k in range(tasks)]
    return [
        label_group(source, group, k, f"digits {group[0]}-{group[-1]}", view, valid, seed) for k, group in enumerate(groups)
    ]


def seen_through(source: Source, pixels: Tensor, index: int, name: str, valid: float, seed: int) -> Task:
    """The whole set as one task, each image seen through a map of its pixels; no image is copied."""
    view = replace(normal((1, 28, 28), MEAN, STD), pixels=pixels[None])
    return Task.build(index, name, source.classes, source.train, source.test, view, valid=valid, seed=seed)


def label_group(source: Source, labels: range, index: int, name: str, view: View, valid: float, seed: int) -> Task:
    """The images of some classes as one task, relabelled from 0; no image is copied."""
    parts, rows = [], []
    for x, y in (source.train, source.test):
        keep = ((y >= labels.start) & (y < labels.stop)).nonzero().flatten()
        parts.append((x, y[keep] - labels.start))
        rows.append(keep)
    return Task.build(index, name, len(labels), parts[0], parts[1], view, valid=valid, seed=seed, keep=(rows[0], rows[1]))


def rotation(degrees: float, size: int) -> Tensor:
    """The map of pixels that turns a square image anticlockwise about its centre, nearest pixel, blank corners."""
    angle, centre = math.radians(degrees), (size - 1) / 2
    y, x = torch.meshgrid(torch.arange(size) - centre, torch.arange(size) - centre, indexing="ij")
    from_x = (math.cos(angle) * x - math.sin(angle) * y + centre).round().long()
    from_y = (math.sin(angle) * x + math.cos(angle) * y + centre).round().long()
    inside = (from_x >= 0) & (from_x < size) & (from_y >= 0) & (from_y < size)
    return torch.where(inside, from_y * size + from_x, -1).flatten()
