"""Errors of a training step in clear words: a loss that is not finite, and a batch too small for a batch norm."""

import torch

from hatrack.methods.divergence import NOT_THE_RATE, Diverged
from hatrack.methods.method import Method
from hatrack.regime import Regime
from hatrack.tasks.batches import count_batches
from hatrack.tasks.task import Task


def diverged(method: Method, task: Task, regime: Regime, what: str, epoch: int, step: int | None = None) -> Diverged:
    """Make the error of a loss that is not finite: where it happened, the likely cause and what to try.

    Args:
        method: the method, which knows likely causes.
        task: the task.
        regime: the regime, with the present learning rate.
        what: what is not finite.
        epoch: the number of the epoch, from 0.
        step: the number of the step in it; None: it was seen on validation data.
    """
    where = f"task {task.name!r}, epoch {epoch + 1}"
    where += "" if step is None else f", step {step + 1} of {count_batches(len(task.train), regime.batch)}"
    untouched = epoch == 0 and step == 0
    error = Diverged(f"{where}: the {what}; {NOT_THE_RATE if untouched else method.explain_divergence(regime)}")
    error.seen, error.may_be_the_rate = f"{where}: the {what}", not untouched
    return error


def single_example(error: ValueError, task: Task, regime: Regime, examples: int) -> ValueError | None:
    """Return a clearer error if a batch norm was given a single example.

    Args:
        error: what the step raised.
        task: the task.
        regime: the regime.
        examples: how many examples the batch had.
    """
    parts = torch.arange(examples).chunk(regime.accumulate)
    if "more than 1 value per channel" not in str(error) or len(parts[-1]) > 1:
        return None
    of = f"accumulate={regime.accumulate} leaves 1 example in a part of a batch of {examples}"
    what = of if len(parts) > 1 else f"a batch of {examples} example"
    return ValueError(f"task {task.name!r}: {what}, and a batch norm needs at least 2 (a larger batch or fewer parts)")
