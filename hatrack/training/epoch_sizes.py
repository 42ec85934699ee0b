"""The sizes of the epochs of a fit: steps, examples, the batches among them, and the room for their losses."""

import torch

from hatrack.regime import Regime
from hatrack.tasks.batches import count_batches, split_batches
from hatrack.tasks.task import Task


def max_steps(task: Task, regime: Regime) -> int:
    """Return how many steps a fit of a task has at most."""
    return regime.steps or count_batches(len(task.train), regime.batch) * regime.epochs


def count_examples(task: Task, regime: Regime, epoch: int) -> int:
    """Return how many examples an epoch has: all, or in the last epoch those of the steps that are left."""
    examples = len(task.train)
    batches = count_batches(examples, regime.batch)
    left = regime.steps - epoch * batches
    return left * regime.batch if regime.steps and left < batches else examples


def full_batch(task: Task, regime: Regime) -> int:
    """Return how many examples a full batch has."""
    return len(split_batches(torch.arange(len(task.train)), regime.batch)[0])


def room_for_losses(batches: int) -> int:
    """Return the size of the buffer for the losses of an epoch. It is the same for tasks of about the same size, so that
    their steps are compiled once."""
    return int(2 ** max(10, batches.bit_length()))
