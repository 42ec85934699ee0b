"""Task sequences: functions of a seed that return a list of tasks. Both tables are written out by hand."""

from collections.abc import Callable

from hatrack.benchmarks.cifar import cifar, cifar10_5, cifar100_5, cifar100_20
from hatrack.benchmarks.custom import own
from hatrack.benchmarks.mixture import digits_and_clothes, mixture, mixture_open
from hatrack.benchmarks.mnist import pmnist, pmnist_blocks, rmnist, smnist
from hatrack.tasks.task import Task

BENCHMARKS: dict[str, Callable[..., list[Task]]] = {
    "cifar": cifar,
    "cifar10-5": cifar10_5,
    "cifar100-5": cifar100_5,
    "cifar100-20": cifar100_20,
    "digits-and-clothes": digits_and_clothes,
    "mixture": mixture,
    "mixture-open": mixture_open,
    "own": own,
    "pmnist": pmnist,
    "pmnist-blocks": pmnist_blocks,
    "rmnist": rmnist,
    "smnist": smnist,
}

DEFAULT_NETWORK = {  # the network of a run that names none
    "cifar": "alexnet",
    "cifar10-5": "alexnet",
    "cifar100-5": "alexnet",
    "cifar100-20": "alexnet",
    "digits-and-clothes": "mlp",
    "mixture": "alexnet",
    "mixture-open": "alexnet",
    "own": "mlp",
    "pmnist": "mlp",
    "pmnist-blocks": "mlp",
    "rmnist": "mlp",
    "smnist": "mlp",
}
