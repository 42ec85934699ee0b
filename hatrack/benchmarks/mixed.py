"""Task sequences that mix data sets."""

from hatrack.benchmarks.mnist import MEAN, STD, label_group
from hatrack.benchmarks.sources import Data, Valid, load
from hatrack.options import check
from hatrack.task import Task, normal

SETS = {  # name of its groups: data set, mean, standard deviation (of the training set)
    "digits": ("mnist", MEAN, STD),
    "clothes": ("fashion-mnist", 0.2860, 0.3530),
}


def digits_and_clothes(seed: int = 0, *, data: Data = "full", valid: Valid = 0.15) -> list[Task]:
    """Six tasks that alternate between three digits of MNIST and three kinds of clothes of Fashion-MNIST."""
    check(digits_and_clothes, locals())
    tasks: list[Task] = []
    for group in (range(3), range(3, 6), range(6, 9)):
        for kind, (name, mean, std) in SETS.items():
            view = normal((1, 28, 28), mean, std)
            title = f"{kind} {group[0]}-{group[-1]}"
            tasks.append(label_group(load(name, data), group, len(tasks), title, view, valid, seed))
    return tasks
