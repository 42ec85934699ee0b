"""Benchmarks of the classes of CIFAR-10 and CIFAR-100: colour images of 32x32 pixels."""

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np

from hatrack.benchmarks.mnist import consecutive_labels, labels_as_task
from hatrack.datasets import sources
from hatrack.datasets.sources import Valid
from hatrack.options import Option, check
from hatrack.tasks.arrays import normalisation
from hatrack.tasks.task import Task, with_crops
from hatrack.tasks.transform import Transform

SHAPE = (3, 32, 32)
MEAN = (125.3 / 255, 123.0 / 255, 113.9 / 255)  # of CIFAR-10; 001's code uses them for CIFAR-100 too
STD = (63.0 / 255, 62.1 / 255, 66.7 / 255)
Augment = Annotated[bool, Option("random crops and flips of the training images: see the regime's augment", retired=True)]
Group = tuple[str, Sequence[int]]  # a data set and some of its labels


def cifar(
    seed: int = 0,
    *,
    tasks: Annotated[int, Option("how many tasks: the first of the seed's order", low=1, high=10, added=True)] = 10,
    valid: Valid = 0.15,
    augment: Augment = False,
) -> list[Task]:
    """Five tasks of 2 classes of CIFAR-10 and five of 20 classes of CIFAR-100, in the order of the seed (001 and 000).

    The paper holds out 15 % for validation, its code 10 % (`--valid 0.1`). Methods that share a budget among all tasks, such
    as `pnn --columns budget`, get another network for fewer tasks: 001's sequences of other lengths.
    """
    check(cifar, locals())
    groups: list[Group] = [("cifar10", labels) for labels in consecutive_labels(10, 2)]
    groups += [("cifar100", labels) for labels in consecutive_labels(100, 20)]
    order = np.arange(len(groups))
    np.random.RandomState(seed).shuffle(order)
    chosen = [groups[number] for number in order[:tasks].tolist()]
    return _tasks(chosen, normalisation(SHAPE, MEAN, STD), valid, augment, seed)


def cifar10_5(seed: int = 0, *, valid: Valid = 0.15, augment: Augment = False) -> list[Task]:
    """CIFAR-10 as five tasks of 2 classes, in the order of the labels (003)."""
    check(cifar10_5, locals())
    groups: list[Group] = [("cifar10", labels) for labels in consecutive_labels(10, 2)]
    return _tasks(groups, normalisation(SHAPE, MEAN, STD), valid, augment, seed)


def cifar100_5(seed: int = 0, *, valid: Valid = 0.15, augment: Augment = False) -> list[Task]:
    """CIFAR-100 as five tasks of 20 classes, in the order of the labels (003)."""
    check(cifar100_5, locals())
    groups: list[Group] = [("cifar100", labels) for labels in consecutive_labels(100, 20)]
    return _tasks(groups, normalisation(SHAPE, MEAN, STD), valid, augment, seed)


def cifar100_20(
    seed: int = 0,
    *,
    labels: Annotated[
        Literal["consecutive", "random"],
        Option("five classes per task: in the order of the labels as in 004's code, or drawn by the seed as 004 says"),
    ] = "consecutive",
    valid: Valid = 0.0,
    augment: Augment = False,
) -> list[Task]:
    """CIFAR-100 as twenty tasks of 5 classes, pixels / 255 and no more, nothing held out for validation (004)."""
    check(cifar100_20, locals())
    order = np.random.RandomState(seed).permutation(100) if labels == "random" else np.arange(100)
    groups: list[Group] = [("cifar100", group) for group in order.reshape(20, 5).tolist()]
    return _tasks(groups, normalisation(SHAPE, 0.0, 1.0), valid, augment, seed)


def _tasks(groups: Sequence[Group], transform: Transform, valid: float, augment: bool, seed: int) -> list[Task]:
    """Return one task per group of labels."""
    loaded = sources.load_all(sorted({name for name, _ in groups}))
    made = []
    for k, (name, labels) in enumerate(groups):
        made.append(labels_as_task(loaded[name], labels, k, f"{name} {_span(labels)}", transform, valid, seed))
    return augmented(made) if augment else made


def augmented(tasks: Sequence[Task]) -> list[Task]:
    """Return copies of the tasks whose training images are randomly cropped and flipped."""
    return [with_crops(task) for task in tasks]


def _span(labels: Sequence[int]) -> str:
    """Return labels as text: "20-39" if they are consecutive, otherwise "3,14,15,92,65"."""
    consecutive = list(labels) == list(range(labels[0], labels[0] + len(labels)))
    return f"{labels[0]}-{labels[-1]}" if consecutive else ",".join(map(str, labels))
