"""Measure the flatness of the losses of tasks, from the models of a run after each of its tasks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hatrack.inspection.flatness import Flatness, Line
from hatrack.inspection.hessian import TaskLoss, even_sample
from hatrack.inspection.lanczos import Spectrum, largest_eigenvalues
from hatrack.methods.method import Method
from hatrack.options import expect, whole
from hatrack.seeds import generator
from hatrack.tasks.task import Task

Show = Callable[[float, str], None]  # the share that is done, and what is being measured


def flatness(
    methods: Sequence[Method],
    tasks: Sequence[Task],
    *,
    images: int = 1000,
    eigenvalues: int = 3,
    points: int = 11,
    progress: Show | None = None,
) -> Flatness:
    """Measure how curved the training losses of tasks are, how far later tasks moved the weights, and what they forgot.

    All losses are cross-entropies on training data without dropout, as functions of the parameters that tasks share.

    Args:
        methods: the method after each task, one object per task: loaded from the files of `hatrack run --keep-each`.
        tasks: the tasks, in the order of learning.
        images: on how many training images of every task, at even distances; 0: all.
        eigenvalues: how many of the largest eigenvalues of every Hessian.
        points: places on the line between the ends of two tasks.
        progress: called with the share that is done and what is being measured.

    Returns:
        What was measured; see `Flatness`.

    Raises:
        ValueError: if the tasks share no parameters, as those of `independent`.

    Example:
        >>> import copy
        >>> methods = []
        >>> method, fit = hr.Method(hr.Network(trunk, tasks=tasks)), hr.Trainer(hr.Regime(epochs=2))
        >>> for task in tasks:
        ...     result = method.learn(task, fit)
        ...     methods.append(copy.deepcopy(method))
        >>> found = hr.flatness(methods, tasks, images=50)
        >>> len(found.top), len(found.moved)
        (2, 1)
    """
    _check(methods, tasks, images, eigenvalues, points)
    samples, show = [even_sample(task.train, images) for task in tasks], progress or (lambda share, text: None)
    ends = [TaskLoss(method, sample) for method, sample in zip(methods, samples, strict=True)]
    _check_shapes(methods)
    weights = [end.weights() for end in ends]
    spectra, rows = [], []
    for k, (end, task) in enumerate(zip(ends, tasks, strict=True)):
        show(k / len(tasks), f"{task.name}: curvature ({k + 1} of {len(tasks)})")
        spectra.append(_spectrum(end, k, eigenvalues))
        show((k + 0.8) / len(tasks), f"{task.name}: forgetting ({k + 1} of {len(tasks)})")
        rows.append(_row(end, k, methods, weights))
    lines = [_line(ends[k], ends[k + 1], points) for k in range(len(tasks) - 1)]
    show(1.0, "")
    return Flatness(
        tasks=[task.name for task in tasks],
        parameters=len(weights[0]),
        images=[len(sample) for sample in samples],
        eigenvalues=[spectrum.values for spectrum in spectra],
        errors=[spectrum.errors for spectrum in spectra],
        gradients=[row["gradient"][0] for row in rows],
        distances=[row["distances"] for row in rows],
        losses=[row["losses"] for row in rows],
        linear=[row["linear"] for row in rows],
        quadratic=[row["quadratic"] for row in rows],
        lines=lines,
    )


def _check(methods: Sequence[Method], tasks: Sequence[Task], images: int, eigenvalues: int, points: int) -> None:
    for method in methods:
        expect("methods", method, Method, "a method per task, as it was at the end of the task")
    for task in tasks:
        expect("tasks", task, Task, "tasks")
    if len(methods) != len(tasks) or not tasks:
        raise ValueError(f"one method per task is needed, as it was at the end of the task: {len(methods)} methods for "
                         f"{len(tasks)} tasks")  # fmt: skip
    if len({id(method) for method in methods}) < len(methods):
        raise ValueError("methods must be a copy per task: one object can't hold the weights at the ends of several tasks")
    for name, value, least in (("images", images, 0), ("eigenvalues", eigenvalues, 1), ("points", points, 2)):
        if whole(name, value) < least:
            raise ValueError(f"{name} must be at least {least}, not {value}")
    for k, (method, task) in enumerate(zip(methods, tasks, strict=True)):
        if list(method.history.values()) != [one.name for one in tasks[: k + 1]]:
            learned = ", ".join(method.history.values()) or "nothing"
            raise ValueError(f"method {k} must have learned the tasks up to {task.name!r} in order, not {learned}")


def _check_shapes(methods: Sequence[Method]) -> None:
    """Raise an error if the shared parameters are not the same ones in all methods."""
    first = _shared(methods[0])
    for method in methods[1:]:
        if _shared(method) != first:
            raise ValueError(
                f"the shared parameters of {type(method).__name__} have other shapes after some tasks, because the network "
                "grows: there is no distance between them"
            )


def _shared(method: Method) -> list[torch.Size]:
    return [p.shape for p in method.net.shared_parameters()]


def _spectrum(end: TaskLoss, number: int, count: int) -> Spectrum:
    """Return the largest eigenvalues of the Hessian at the end of a task."""
    weights = end.weights()
    start = torch.randn(len(weights), generator=generator(0, "flatness", number)).to(weights)
    return largest_eigenvalues(end.product, start, count=count)


def _row(end: TaskLoss, number: int, methods: Sequence[Method], weights: Sequence[Tensor]) -> dict[str, list[float]]:
    """Return the distances, the losses and the two parts of the forgetting of a task, at its end and after later tasks."""
    gradient = end.gradient()
    row: dict[str, list[float]] = {"gradient": [float(gradient.norm())]}
    steps = [later - weights[number] for later in weights[number:]]
    row["distances"] = [float(step.norm()) for step in steps]
    row["losses"] = [TaskLoss(method, end.split).value() for method in methods[number:]]
    row["linear"] = [float(gradient @ step) for step in steps]
    row["quadratic"] = [0.5 * float(step @ end.product(step)) if step.any() else 0.0 for step in steps]
    return row


def _line(one: TaskLoss, two: TaskLoss, points: int) -> Line:
    """Return the losses of two tasks on the line between the networks at their ends.

    The loss of a task is computed by the method at the end of this task, with its masks, on the values between both.
    """
    at, losses = [k / (points - 1) for k in range(points)], []
    for end in (one, two):
        values = []
        for place in at:
            with between(one.method, two.method, end.method, place):
                values.append(end.value())
        losses.append(values)
    return Line(at, *losses)


@contextmanager
def between(one: Method, two: Method, target: Method, place: float) -> Iterator[None]:
    """Within it the network of `target` has values between those of two methods; afterwards its own again.

    Parameters and buffers of floating-point numbers are taken from the line, running means of norms among them.

    Args:
        one: the method at place 0.
        two: the method at place 1.
        target: the method whose network gets the values; one of the two.
        place: the place on the line.
    """
    first, second, own = (dict(method.net.state_dict()) for method in (one, two, target))
    names = [name for name, value in own.items() if value.is_floating_point() and name in first and name in second]
    names = [name for name in names if first[name].shape == second[name].shape]
    mixed = {name: torch.lerp(first[name], second[name], place) for name in names}
    kept = {name: own[name].clone() for name in names}
    with torch.no_grad():
        try:
            for name in names:
                own[name].copy_(mixed[name])
            yield
        finally:
            for name in names:
                own[name].copy_(kept[name])
