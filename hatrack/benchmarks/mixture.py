"""Benchmarks that mix data sets: the eight sets of HAT (001), and a small one of digits and clothes."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hatrack.benchmarks.cifar import MEAN as CIFAR_MEAN
from hatrack.benchmarks.cifar import STD as CIFAR_STD
from hatrack.benchmarks.cifar import Augment, augmented
from hatrack.benchmarks.mnist import MEAN, STD, labels_as_task
from hatrack.datasets import sources
from hatrack.datasets.sources import Data, Valid
from hatrack.options import check
from hatrack.tasks.arrays import normalisation
from hatrack.tasks.task import Task
from hatrack.tasks.transform import Transform

COLOUR = (3, 32, 32)


class Norm(NamedTuple):
    """Mean and standard deviation of training images scaled to 0 to 1: one number, or one per channel."""

    mean: float | Sequence[float]
    std: float | Sequence[float]


NORMS = {  # of images converted to 3x32x32; docs/benchmarks.md says where each comes from
    "cifar10": Norm(CIFAR_MEAN, CIFAR_STD),
    "cifar100": Norm(CIFAR_MEAN, CIFAR_STD),
    "mnist": Norm(0.1, 0.2752),
    "svhn": Norm((0.4377, 0.4438, 0.4728), (0.198, 0.201, 0.197)),
    "fashion-mnist": Norm(0.2190, 0.3318),
    "gtsrb": Norm((0.3398, 0.3117, 0.3210), (0.2755, 0.2647, 0.2712)),
    "facescrub": Norm((0.5163, 0.5569, 0.4695), (0.2307, 0.2272, 0.2479)),
    "notmnist": Norm(0.4254, 0.4501),
    "emnist-letters": Norm(0.1319, 0.2986),
    "caltech101": Norm((0.5472, 0.5299, 0.5026), (0.2929, 0.2867, 0.3012)),
}
PAPER = ("cifar10", "cifar100", "mnist", "svhn", "fashion-mnist", "gtsrb", "facescrub", "notmnist")  # 0 to 7 in 001's code
REPLACEMENTS = {"svhn": "emnist-letters", "facescrub": "caltech101"}  # in mixture-open


def mixture(seed: int = 0, *, valid: Valid = 0.15, augment: Augment = False, only: str = "") -> list[Task]:
    """The eight image sets of HAT (001), each a task, in the random order of the seed."""
    check(mixture, locals())
    return _whole_sets(PAPER, valid, augment, seed, only)


def mixture_open(seed: int = 0, *, valid: Valid = 0.15, augment: Augment = False, only: str = "") -> list[Task]:
    """As mixture, with EMNIST letters in place of SVHN and Caltech-101 in place of FaceScrub, which is not free."""
    check(mixture_open, locals())
    return _whole_sets([REPLACEMENTS.get(name, name) for name in PAPER], valid, augment, seed, only)


def digits_and_clothes(seed: int = 0, *, data: Data = "full", valid: Valid = 0.15) -> list[Task]:
    """Six tasks that alternate between three digits of MNIST and three kinds of clothes of Fashion-MNIST."""
    check(digits_and_clothes, locals())
    kinds = {"digits": ("mnist", MEAN, STD), "clothes": ("fashion-mnist", 0.2860, 0.3530)}
    loaded = sources.load_all(["mnist", "fashion-mnist"], data)
    tasks: list[Task] = []
    for group in (range(3), range(3, 6), range(6, 9)):
        for kind, (name, mean, std) in kinds.items():
            transform, title = normalisation((1, 28, 28), mean, std), f"{kind} {group[0]}-{group[-1]}"
            tasks.append(labels_as_task(loaded[name], group, len(tasks), title, transform, valid, seed))
    return tasks


def colour_transform(shape: Sequence[int], norm: Norm) -> Transform:
    """Return the transform of images to 3x32x32: gray images fill all three channels, small ones get a black border.

    Args:
        shape: (channels, height, width) of the images.
        norm: by which they are normalised.
    """
    transform = normalisation(COLOUR, *norm)
    if tuple(shape) == COLOUR:
        return transform
    _, height, width = shape
    top, left = (COLOUR[1] - height) // 2, (COLOUR[2] - width) // 2
    pixels = torch.full(COLOUR, -1)
    pixels[:, top : top + height, left : left + width] = torch.arange(math.prod(shape)).reshape(*shape)
    return replace(transform, pixels=pixels.reshape(1, -1))


def measure_norm(name: str) -> Norm:
    """Compute mean and standard deviation per channel of a training set as 3x32x32; docs/benchmarks.md uses it."""
    images = sources.load(name).train[0]
    return norm_of(images, colour_transform(images.shape[1:], Norm(0.0, 1.0)))


def norm_of(images: Tensor, transform: Transform) -> Norm:
    """Compute mean and standard deviation per channel of images as a transform returns them."""
    sums = torch.zeros(2, transform.shape[0], dtype=torch.float64)
    for part in torch.split(images, 1000):
        x = transform(part).double()
        sums += torch.stack([x.sum((0, 2, 3)), x.square().sum((0, 2, 3))])
    mean, square = sums / (len(images) * math.prod(transform.shape[1:]))
    return Norm(mean.tolist(), (square - mean.square()).sqrt().tolist())


def _whole_sets(names: Sequence[str], valid: float, augment: bool, seed: int, only: str) -> list[Task]:
    """Return one task per set, in the random order of the seed; only the set with the name or the number `only`, if there is
    one, so that the others need not be there."""
    order = np.arange(len(names))
    np.random.RandomState(seed).shuffle(order)
    ordered = dict(enumerate(names[number] for number in order.tolist()))
    chosen = {k: name for k, name in ordered.items() if only in (name, str(k))} or ordered
    loaded = sources.load_all(chosen.values())
    tasks = []
    for k, name in chosen.items():
        source = loaded[name]
        transform = colour_transform(source.train[0].shape[1:], NORMS[name])
        tasks.append(Task.build(k, name, source.classes, source.train, source.test, transform, valid=valid, seed=seed))
    return augmented(tasks) if augment else tasks
