"""Data sets that are read item by item, with and without random transforms."""

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from hatrack import Task
from tests.helpers.toys import toy_tasks


class Pairs(Dataset):
    """(input, label) pairs of tensors; `noise` says from which generator each read adds a random number."""

    def __init__(self, x: Any, y: Any, noise: str = "") -> None:
        self.x, self.y, self.noise = x, y, noise
        self.reads = 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> Any:
        self.reads += 1
        draw = {"torch": lambda: float(torch.rand(())), "numpy": np.random.rand, "python": random.random, "": lambda: 0.0}
        return self.x[number] + draw[self.noise]() if self.noise else self.x[number], self.y[number]


def pairs_of(task: Task, noise: str = "") -> list[Pairs]:
    """Return the training, validation and test data of a task in memory as data sets."""
    parts = (task.train, task.valid, task.test)
    return [Pairs(part.raw(torch.arange(len(part))), part.y, noise) for part in parts]


def streamed(task: Task, *, workers: int = 0, noise: str = "", **how: Any) -> Task:
    """Return a task in memory as one whose images are read by loaders."""
    train, valid, test = (DataLoader(pairs, num_workers=workers) for pairs in pairs_of(task, noise))
    return Task.from_loaders(task.index, task.name, train, valid, test, **{"classes": task.classes, **how})


def streamed_toys(count: int, *, workers: int = 0, noise: str = "", **how: Any) -> list[Task]:
    """Return the toy tasks as streams."""
    return [streamed(task, workers=workers, noise=noise) for task in toy_tasks(count, **how)]
