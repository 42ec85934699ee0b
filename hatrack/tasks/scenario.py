"""The three scenarios of the field: what is known of the task at test, and what the labels of the tasks mean.

In the scenario "task", the number of the task is known. In "domain" it is unknown, and all tasks have the same labels. In
"class" it is unknown too, and every class of every task has a label of its own. See docs/scenarios.md.
"""

from collections.abc import Sequence
from dataclasses import replace

from hatrack.options import choose
from hatrack.registry import SCENARIOS, Scenario
from hatrack.tasks.split import Split
from hatrack.tasks.targets import CLASSES
from hatrack.tasks.task import Task
from hatrack.tasks.transform import Transform


def in_scenario(tasks: Sequence[Task], scenario: Scenario) -> list[Task]:
    """Return the tasks as a scenario has them; no image is copied.

    In "domain" and "class" nothing that the network sees may tell which task an image belongs to, so all tasks get the
    normalisation (mean and standard deviation) of the first one. Maps of pixels stay as they are: a permutation or a
    rotation makes the images of a task, it does not normalise them.

    Args:
        tasks: the tasks in their order, each with labels from 0.
        scenario: "task", "domain" or "class".

    Returns:
        The tasks. In "class" the labels of a task begin after those of the tasks before it.

    Raises:
        ValueError: if there is no such scenario, or tasks of "domain" have different numbers of classes.

    Example:
        >>> for task in hr.in_scenario(tasks, "class"):
        ...     print(task.name, task.first, task.classes)
        digits 0 10
        signs 10 3
    """
    choose("scenario", scenario, SCENARIOS)
    if scenario == "task":
        return list(tasks)
    for task in tasks:
        if task.target is not CLASSES:
            raise ValueError(
                f"scenario {scenario!r} needs tasks of plain classes; {task.name!r} has other targets, or weights"
            )
        if scenario == "domain" and task.classes != tasks[0].classes:
            raise ValueError(
                f"scenario 'domain' needs the same classes in all tasks: {tasks[0].name!r} has {tasks[0].classes}, "
                f"{task.name!r} {task.classes}; 'task' and 'class' take both"
            )
    found, first = [], 0
    for task in tasks:
        found.append(_moved(task, tasks[0].train.transform, first if scenario == "class" else 0))
        first += task.classes
    return found


def _moved(task: Task, common: Transform, first: int) -> Task:
    """Return a task with a common normalisation whose labels count from `first`."""

    def part(split: Split) -> Split:
        transform = replace(split.transform, mean=common.mean, std=common.std)
        return replace(split, y=split.y + (first - task.first), transform=transform)

    train = part(task.train)
    valid = train if task.valid is task.train else part(task.valid)
    return replace(task, train=train, valid=valid, test=part(task.test), first=first)
