"""Checks of what a method is given: images, numbers of tasks, and a task to learn."""

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hatrack.networks.network import Network
from hatrack.options import shown
from hatrack.tasks.split import TaskId, task_ids
from hatrack.tasks.task import Task

if TYPE_CHECKING:
    from hatrack.methods.method import Method


def check_task(method: "Method", task: Any, fit: Any) -> None:
    """Raise an error in one line if a method can't learn a task, or would lose another one by it."""
    if not isinstance(task, Task) or not callable(fit):
        raise ValueError("learn takes a Task and a Trainer: method.learn(task, Trainer(regime))")
    if method.history.get(task.index, task.name) != task.name:
        raise ValueError(
            f"task {task.index} is {method.history[task.index]!r}, which has been learned, and {task.name!r} would take "
            f"its place: net.add_task gives it a number of its own; forget_task({task.index}) gives up the old one"
        )
    method.net.check_task(task)
    task.target.check_for(type(method).__name__, method.targets, task.name)


def check_images(net: Network, x: Any) -> None:
    """Raise an error in one line if these are no images as a network sees them."""
    if not isinstance(x, Tensor):
        raise ValueError(f"images must be a tensor, not {type(x).__name__}: method.predict takes arrays as well")
    if x.dtype == torch.uint8:
        raise ValueError(
            "images of type uint8 are raw: method.predict(images, task) takes them; method.net.preprocess(images, task) "
            "makes them what the network sees"
        )
    if net.example.is_floating_point() and not (x.is_floating_point() or x.is_complex()):
        raise ValueError(f"the network sees floats, not {str(x.dtype).removeprefix('torch.')}")


def task_number(task: Any, images: int) -> TaskId:
    """Return a task's number as an int; the numbers of many tasks, one per image, as a tensor of int64."""
    if isinstance(task, Tensor) and task.dim():
        return task_ids(task, images)
    try:
        if isinstance(task, bool):
            raise TypeError
        return operator.index(task)
    except TypeError:
        raise ValueError(f"a task is given by its number, or a tensor of them, one per image, not {shown(task)}") from None
