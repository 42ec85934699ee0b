"""The beginning and the end of a block of learning: what is checked, made final and sealed, and what users are warned of."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from hatrack.guard.backbone import evaluating
from hatrack.guard.finished import Finished, check_finite, digest
from hatrack.guard.lesson import Lesson
from hatrack.guard.rollback import Rollback
from hatrack.guard.sealing import Sealed, tensors_of
from hatrack.guard.soft_gates import Gated
from hatrack.methods.guarantees import logits, probes_on


def follow_device(method: Gated, device: torch.device) -> None:
    """Move what the method has to the device of the backbone, if the backbone was moved. It must be bare."""
    if method.net.example.device != device:
        method.to(device)


def make_room(method: Gated, device: torch.device) -> int:
    """Return a number for a new task. Those of tasks that were released are used again. The backbone must be bare."""
    follow_device(method, device)
    free = set(range(1, len(method.net.classes))) - method.history.keys()
    number = min(free) if free else method.net.add_task(1)
    method.make_room()
    return number


def begin(lesson: Lesson, tasks: Mapping[str, Finished], optimizers: Sequence[Optimizer]) -> Rollback:
    """Check the finished tasks, note their answers and the state of everything, and begin a task.

    Args:
        lesson: the task; the backbone must be bare.
        tasks: the finished tasks.
        optimizers: the optimizers of the guard.

    Returns:
        What restores the state before the task.
    """
    method = lesson.method
    with evaluating(method.net.trunk):
        for name, task in tasks.items():
            task.check(method, name)
        lesson.probes = probes_on(method, {task.number: method.net.example for task in tasks.values()})
    before = Rollback(method, lesson.own, optimizers, lesson.module.embedding)
    try:
        lesson.begin()
    except BaseException:
        lesson.close()
        before.restore()
        raise
    return before


@torch.no_grad()
def finish(lesson: Lesson, tasks: Mapping[str, Finished], settle: Iterable[Any] | None) -> Finished:
    """Make a task final, check it and all the others, and seal its modules.

    Args:
        lesson: the task; the backbone must be bare.
        tasks: the tasks that were finished before.
        settle: batches on which the running statistics of norms are estimated anew.

    Returns:
        The finished task.
    """
    lesson.follow_device()
    method, own = lesson.method, tensors_of(lesson.own)
    if not lesson.done:
        raise ValueError(
            f"task {lesson.name!r}: no step of an optimizer of the guard followed a backward pass through the backbone in "
            "training mode; guard.add_optimizer(optimizer) adds a new optimizer. The state was rolled back"
        )
    method.constrain()
    for task in tasks.values():
        task.sealed.restore()
    with evaluating(method.net.trunk):
        if settle is not None:
            lesson.settle(settle)
        lesson.finish()
        check_finite(method, lesson.number, own, lesson.name)
        for name, task in tasks.items():
            task.check(method, name)
        lesson.probes.check(method)
        found, answers = digest(method, lesson.number, own), logits(method, lesson.number)
    method.history[lesson.number] = lesson.name
    return Finished(lesson.number, Sealed(lesson.own), found, answers)


def warn_about_statistics(method: Gated, name: str, settle: Any) -> None:
    """Warn if running statistics will not be estimated anew when the task ends."""
    if settle is None and any(key.rpartition(".")[2] == "running_mean" for key in method.norms.names):
        warnings.warn(
            f"the backbone has norms with running statistics, which are learned with soft gates: learn({name!r}, ..., "
            "settle=loader) estimates them anew with the final ones",
            stacklevel=4,
        )


def warn_about_the_end(lesson: Lesson, before: Rollback, guarded: set[int]) -> None:
    """Warn if the gates never became hard, or if parameters were trained that nothing protects.

    Args:
        lesson: the task that was learned.
        before: the state before the task.
        guarded: the parameters that this guard or another one protects, by `id`.
    """
    if lesson.done < lesson.steps:
        warnings.warn(
            f"task {lesson.name!r} ended after {lesson.done} steps of the optimizer, fewer than steps={lesson.steps}: its "
            "gates never became hard; steps is the number of optimizer steps in one epoch",
            stacklevel=4,
        )
    if changed := before.unprotected(guarded):
        warnings.warn(
            f"{changed} parameters of the optimizer changed while {lesson.name!r} was learned that belong neither to the "
            "backbone nor to own=[...]: later tasks may change them again",
            stacklevel=4,
        )
