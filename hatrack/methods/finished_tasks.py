"""What is noted about finished tasks: when one was learned, and when the notes go into a file or come out of one."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hatrack.methods.parts.releasing import note_learned
from hatrack.methods.router import fit_router
from hatrack.tasks.task import Task

if TYPE_CHECKING:
    from hatrack.methods.method import Method


def note_finished(method: "Method", task: Task, images: Tensor | None) -> None:
    """List a task as the last one that was learned.

    Args:
        method: the method.
        task: the task.
        images: images of it that are stored, if the method keeps some.
    """
    method.digests.pop(task.index, None)  # of the task as it was before, if it was learned again
    method.net.set_target(task)
    method.net.note_example(task)
    method.router.delete(task.index)
    note_learned(method, task.index)
    method.history.pop(task.index, None)
    method.history[task.index] = task.name
    if method.stored_images and images is not None:
        method.stored_images.store(task.index, images)
    if method.router.tasks() and {*method.history} - {task.index} <= {*method.router.tasks()}:
        fit_router(method, task)  # it knew all the others, so that it goes on to know all


def notes(method: "Method") -> dict[str, Any]:
    """Return what is known of finished tasks, as plain values."""
    return {
        "tasks": dict(method.history),
        "digests": dict(method.digests),
        "targets": dict(method.net.targets),
        "after": {task: list(others) for task, others in method.learned_after.items()},
        "example": method.net.example_task,
    }


def take_notes(method: "Method", learned: Mapping[str, Any]) -> None:
    """Take over what `notes` returned, perhaps of an earlier version."""
    method.history, method.digests = dict(learned["tasks"]), dict(learned["digests"])
    method.net.targets = dict(learned.get("targets", {}))
    method.learned_after = {task: list(others) for task, others in learned.get("after", {}).items()}
    method.net.example_task = learned.get("example")
