"""What a table of a recipe shows of a record: a measure, and how it follows from the record and its references."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hatrack.experiments import metrics
from hatrack.experiments.record import Record
from hatrack.inspection.flatness import Flatness
from hatrack.reporting.compression import SIZE, size
from hatrack.reporting.measures import MEASURES, Measure
from hatrack.reporting.references import counted_accuracy, counted_summary, lengths


class References(NamedTuple):
    """What belongs to a record: those of joint training and of guessing at the same seed, and the flatness of its run; None
    where there is none."""

    joint: Record | None
    random: Record | None
    flatness: Flatness | None = None


class Quantity(NamedTuple):
    """A column of a recipe's tables.

    Attributes:
        measure: its name, its unit and what it means.
        value: how it follows from a record and its references; NaN if it can't be told.
    """

    measure: Measure
    value: Callable[[Record, References], float]

    @property
    def key(self) -> str:
        """Its name in tables of published numbers."""
        return self.measure.key


def summary(key: str) -> Quantity:
    """Return a measure of `Record.summary`: "accuracy", "learning", "forgetting" and so on."""
    measure = next(m for m in MEASURES if m.key == key)
    return Quantity(measure, lambda record, _: float(counted_summary(record)[key]))


def ratio(after: int = 0) -> Quantity:
    """Return the forgetting ratio (001, Eq. 6) after a number of tasks; 0: after all."""
    title = f"Forgetting ratio after {after} tasks" if after else "Forgetting ratio after all tasks"
    meaning = "0 is as good as joint training on the tasks so far, -1 as guessing."

    def value(record: Record, references: References) -> float:
        found = ratios(record, references)
        return math.nan if found is None or after > len(found) else float(found[after - 1])

    return Quantity(Measure(f"ratio_{after}" if after else "ratio", title, "ratio", meaning), value)


def ratios(record: Record, references: References) -> metrics.Matrix | None:
    """Return the forgetting ratio after every number of tasks; None if a reference has no record at this seed."""
    if references.joint is None or references.random is None:
        return None
    joint, random = counted_accuracy(references.joint), references.random.accuracy
    return metrics.forgetting_ratios(counted_accuracy(record), joint, random, growing=record.spec.scenario == "class")


def accuracy_on(task: int, after: int) -> Quantity:
    """Return the accuracy on a task after a number of tasks was learned, both counted from 1."""
    title = f"Accuracy on task {task} after task {after}"
    measure = Measure(f"task_{task}_after_{after}", title, "%", "The share of test images that are classified correctly.")
    return Quantity(measure, lambda record, _: _entry(record.accuracy, after - 1, task - 1))


def less(first: Quantity, second: Quantity) -> Quantity:
    """Return the difference of two quantities of a record."""
    a, b = first.measure, second.measure
    measure = Measure(f"{a.key}_less_{b.key}", f"{a.title}, less {b.title.lower()}", a.unit, "The difference of the two.")
    return Quantity(measure, lambda record, references: first.value(record, references) - second.value(record, references))


def size_in_use() -> Quantity:
    """Return the share of the weights that the only task of a run uses at the end."""
    return Quantity(SIZE, lambda record, _: size(record))


def accuracy_range() -> Quantity:
    """Return how far apart the accuracies on the tasks are at the end."""
    measure = Measure("range", "Range of accuracies", "%", "The highest accuracy on a task at the end, less the lowest.")
    return Quantity(measure, lambda record, _: float(np.ptp(np.array(record.accuracy[-1], dtype=float))))


def fluctuation() -> Quantity:
    """Return by how much the accuracy on an earlier task goes up and down from epoch to epoch; NaN if it was not watched."""
    meaning = "How far the accuracy on an earlier task moves per epoch of a later one, beyond its change in all of it."
    measure = Measure("fluctuation", "Fluctuation on earlier tasks", "%", meaning)

    def value(record: Record, _: References) -> float:
        found: list[float] = []
        for curve in record.curves:
            steps = np.diff(np.array(curve.watched or [[]], dtype=float)[:, : curve.task], axis=0)
            if steps.size:
                found += ((np.abs(steps).sum(0) - np.abs(steps.sum(0))) / len(steps)).tolist()
        return float(np.mean(found)) if found else math.nan

    return Quantity(measure, value)


def lowest_accuracy() -> Quantity:
    """Return the lowest accuracy on a task at the end."""
    measure = Measure("lowest", "Lowest accuracy of a task", "%", "The accuracy at the end on the task that fares worst.")
    return Quantity(measure, lambda record, _: float(np.nanmin(np.array(record.accuracy[-1], dtype=float))))


def largest_loss() -> Quantity:
    """Return the largest loss on an earlier task, at any time; infinite where it was not a finite number."""
    meaning = "The largest test loss that a finished task had after any later one."
    measure = Measure("largest_loss", "Largest loss on a finished task", "ratio", meaning)

    def value(record: Record, _: References) -> float:
        counted = lengths(record)
        rows = [[math.inf if v is None else v for v in row[:t]] for t, row in enumerate(record.loss) if t + 1 in counted]
        return max((v for row in rows for v in row), default=math.nan)

    return Quantity(measure, value)


def epochs_to(accuracy: float, task: int) -> Quantity:
    """Return how many epochs a task took until its validation accuracy reached a value; NaN if it never did."""
    title = f"Epochs of task {task} to {100 * accuracy:g} %"
    meaning = "The first epoch whose accuracy on validation data is at least this."
    measure = Measure(f"epochs_to_{100 * accuracy:g}", title, "s", meaning)  # one decimal

    def value(record: Record, _: References) -> float:
        points = [point for curve in record.curves if curve.task == task - 1 for point in curve.epochs]
        return next((k + 1.0 for k, p in enumerate(points) if (p.valid_accuracy or 0) >= accuracy), math.nan)

    return Quantity(measure, value)


def accuracy_over_epochs(task: int) -> Quantity:
    """Return the mean over a task's epochs of its accuracy on validation data; NaN without such data."""
    meaning = "The mean over all epochs of the task of the accuracy after the epoch: the sooner it rises, the higher it is."
    measure = Measure(f"over_epochs_{task}", f"Validation accuracy of task {task}, mean over its epochs", "%", meaning)

    def value(record: Record, _: References) -> float:
        found = [point.valid_accuracy for curve in record.curves if curve.task == task - 1 for point in curve.epochs]
        known = [accuracy for accuracy in found if accuracy is not None]
        return float(np.mean(known)) if known and len(known) == len(found) else math.nan

    return Quantity(measure, value)


def parameters_per_task() -> Quantity:
    """Return how many parameters a method keeps at the end, those that tasks share included, divided by the tasks."""
    meaning = "All parameters that the method keeps at the end, divided by the number of tasks."
    measure = Measure("parameters_per_task", "Parameters per task", "count", meaning)
    return Quantity(measure, lambda record, _: record.parameters / len(record.tasks))


def largest_eigenvalue() -> Quantity:
    """Return the largest eigenvalue of the Hessian of a task's training loss at its end, the mean over tasks."""
    meaning = "How curved the training loss of a task is at its end: the mean over tasks."
    return _of_flatness("eigenvalue", "Largest eigenvalue", meaning, lambda found: float(np.mean(found.top)))


def distance_moved() -> Quantity:
    """Return how far the shared weights move in a task, the mean over all tasks but the first."""
    meaning = "From the end of a task to the end of the next, in the weights that tasks share: the mean over tasks."
    return _of_flatness("moved", "Distance moved", meaning, lambda found: float(np.mean(found.moved)))


def loss_forgotten() -> Quantity:
    """Return by how much the training loss of the first task has grown at the end."""
    meaning = "By how much the training loss of task 1 has grown at the end."
    return _of_flatness("loss_forgotten", "Forgetting of task 1", meaning, lambda found: found.forgetting[0][-1])


def forgetting_bound() -> Quantity:
    """Return the bound on `loss_forgotten` to second order."""
    meaning = "1/2 times the largest eigenvalue of task 1 times the squared distance from its end."
    return _of_flatness("bound", "Its bound", meaning, lambda found: found.bounds[0][-1])


def share_of_bound() -> Quantity:
    """Return the largest share of its bound that the forgetting of a task reaches, over all tasks and all later ones."""
    meaning = "The forgetting of a task after a later one, divided by its bound: the largest over all such pairs."
    return _of_flatness("share_of_bound", "Largest share of a bound", meaning, _largest_share)


def _largest_share(found: Flatness) -> float:
    pairs = zip(found.forgetting, found.bounds, strict=True)
    return max((f / bound for lost, bounds in pairs for f, bound in zip(lost[1:], bounds[1:], strict=True) if bound > 0),
               default=math.nan)  # fmt: skip


def _of_flatness(key: str, title: str, meaning: str, value: Callable[[Flatness], float]) -> Quantity:
    def of_run(_: Record, references: References) -> float:
        return math.nan if references.flatness is None else value(references.flatness)

    return Quantity(Measure(key, title, "ratio", meaning), of_run)


def _entry(values: list[list[float]], row: int, column: int) -> float:
    """Return an entry of a matrix; NaN if it has none there."""
    return float(values[row][column]) if row < len(values) and column < len(values[row]) else math.nan
