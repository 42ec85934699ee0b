"""Benchmarks: functions of a seed that return a list of tasks. The table BENCHMARKS is written out by hand."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from hatrack.registry import Entry, Registry

if TYPE_CHECKING:
    from hatrack.tasks.task import Task

BENCHMARKS: "Registry[Callable[..., list[Task]]]" = Registry("benchmark", {
    "cifar": Entry(
        "hatrack.benchmarks.cifar:cifar",
        "Five tasks of 2 classes of CIFAR-10 and five of 20 classes of CIFAR-100, in the order of the seed (001 and 000).",
        network="alexnet",
    ),
    "cifar10-5": Entry(
        "hatrack.benchmarks.cifar:cifar10_5",
        "CIFAR-10 as five tasks of 2 classes, in the order of the labels (003).",
        network="alexnet",
    ),
    "cifar100-5": Entry(
        "hatrack.benchmarks.cifar:cifar100_5",
        "CIFAR-100 as five tasks of 20 classes, in the order of the labels (003).",
        network="alexnet",
    ),
    "cifar100-20": Entry(
        "hatrack.benchmarks.cifar:cifar100_20",
        "CIFAR-100 as twenty tasks of 5 classes, pixels / 255 and no more, nothing held out for validation (004).",
        network="alexnet",
    ),
    "digits-and-clothes": Entry(
        "hatrack.benchmarks.mixture:digits_and_clothes",
        "Six tasks that alternate between three digits of MNIST and three kinds of clothes of Fashion-MNIST.",
        network="mlp",
    ),
    "mixture": Entry(
        "hatrack.benchmarks.mixture:mixture",
        "The eight image sets of HAT (001), each a task, in the random order of the seed.",
        network="alexnet",
    ),
    "mixture-open": Entry(
        "hatrack.benchmarks.mixture:mixture_open",
        "As mixture, with EMNIST letters in place of SVHN and Caltech-101 in place of FaceScrub, which is not free.",
        network="alexnet",
    ),
    "own": Entry(
        "hatrack.benchmarks.custom:own",
        "Tasks of your own, from a TOML file: --tasks FILE.toml names a .npz file or an image folder per task.",
        network="mlp",
    ),
    "pmnist": Entry(
        "hatrack.benchmarks.mnist:pmnist",
        "Permuted MNIST: every task shows the same digits with its pixels in another order (001, ten tasks).",
        network="mlp",
    ),
    "pmnist-blocks": Entry(
        "hatrack.benchmarks.mnist:pmnist_blocks",
        "MNIST cut into 16 blocks of 7x7 pixels whose places are permuted (002, proposed for convolutional networks).",
        network="mlp",
    ),
    "rmnist": Entry(
        "hatrack.benchmarks.mnist:rmnist",
        "Rotated MNIST (004): task k, from 0, is turned by k steps less a random part of one step.",
        network="mlp",
    ),
    "smnist": Entry(
        "hatrack.benchmarks.mnist:smnist",
        "Split MNIST: the digits in order, as two tasks of five (001) or five tasks of two.",
        network="mlp",
    ),
})  # fmt: skip
