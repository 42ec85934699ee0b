"""Task sequences: functions of a seed that return a list of tasks. BENCHMARKS is written out by hand."""

from collections.abc import Callable

from hatrack.benchmarks.mixed import digits_and_clothes
from hatrack.benchmarks.mnist import pmnist, rmnist, smnist
from hatrack.task import Task

BENCHMARKS: dict[str, Callable[..., list[Task]]] = {
    "digits-and-clothes": digits_and_clothes,
    "pmnist": pmnist,
    "rmnist": rmnist,
    "smnist": smnist,
}
