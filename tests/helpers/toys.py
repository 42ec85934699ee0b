"""Small made-up tasks that a small network learns in a few epochs."""

import math

import numpy as np

from hatrack import Task


def toy_tasks(
    count: int = 3,
    classes: int = 3,
    shape: tuple[int, ...] = (1, 4, 4),
    *,
    train: int = 60,
    test: int = 30,
    valid: float = 0.2,
    noise: float = 0.3,
    seed: int = 0,
) -> list[Task]:
    """Every class of every task is a cloud around a centre of its own; the same arguments give the same tasks."""
    tasks = []
    for index in range(count):
        draw = np.random.RandomState(1000 * seed + index)
        centres = draw.normal(size=(classes, math.prod(shape)))
        parts = []
        for size in (train, test):
            y = np.arange(size) % classes
            x = centres[y] + noise * draw.normal(size=(size, math.prod(shape)))
            parts += [x.astype(np.float32).reshape(size, *shape), y]
        tasks.append(Task.from_arrays(index, f"toy {index}", *parts, classes=classes, valid=valid, seed=seed))
    return tasks
