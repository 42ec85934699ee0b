"""The accuracy of a run without a task id, with a router that is fitted on all tasks at the end."""

from collections.abc import Callable, Sequence

import torch

from hatrack.experiments.record_parts import Routed
from hatrack.methods.evaluate import images_per_batch
from hatrack.methods.method import Method
from hatrack.methods.router import Kind, answers
from hatrack.tasks.device import split_to_device
from hatrack.tasks.split import Split
from hatrack.tasks.task import Task


def fit_and_route(
    method: Method, tasks: Sequence[Task], kind: Kind, *, wait: Callable[[], None] | None = None
) -> Routed | None:
    """Fit the router of a method on all tasks, and return its results on their test data.

    Args:
        method: a method that has learned these tasks.
        tasks: the tasks.
        kind: the kind of score.
        wait: called before the results are read from the device.

    Returns:
        The results; None if the method does not guarantee that finished tasks stay as they are.
    """
    if not all(method.used_by(task.index) for task in tasks):
        return None
    for task in tasks:
        method.fit_router(task)
    return routed(method, [task.test for task in tasks], kind, wait=wait)


@torch.no_grad()
def routed(method: Method, splits: Sequence[Split], kind: Kind, *, wait: Callable[[], None] | None = None) -> Routed:
    """Return the results of a router on data sets of single tasks. With a shared head only the class has to be right.

    Args:
        method: a method whose router was fitted on all tasks.
        splits: a data set per task; they are brought to the device of the method.
        kind: the kind of score.
        wait: called before the results are read from the device.
    """
    device = method.net.example.device
    counts = torch.zeros(len(splits), 2, dtype=torch.int64, device=device)  # right answers, and right tasks
    for count, split in zip(counts, splits, strict=True):
        split = split_to_device(split, device)
        for index in torch.split(torch.arange(len(split), device=device), images_per_batch(split)):
            found = answers(method, split.raw(index), kind)
            task, label = found.task == split.task, found.label == split.y[index]
            count += torch.stack([(label if method.net.shared else label & task).sum(), task.sum()])
    if wait:
        wait()
    shares = [[value / len(split) for value in row] for row, split in zip(counts.tolist(), splits, strict=True)]
    return Routed(kind, [accuracy for accuracy, _ in shares], [task for _, task in shares])
