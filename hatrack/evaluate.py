"""How well a method does on a data set."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F

from hatrack.method import Method
from hatrack.task import Split

BATCH = 1000


class Score(NamedTuple):
    loss: float
    accuracy: float


@torch.no_grad()
def evaluate(method: Method, split: Split) -> Score:
    """Mean cross-entropy and accuracy, in evaluation mode, with one wait for the device."""
    mode = method.training
    method.eval()
    total = torch.zeros(2, dtype=torch.float64, device=split.y.device)
    for index in torch.split(torch.arange(len(split), device=split.y.device), BATCH):
        task = split.task if isinstance(split.task, int) else split.task[index]
        logits, y = method(split.inputs(index), task), split.y[index]
        total[0] += F.cross_entropy(logits, y, reduction="sum")
        total[1] += (logits.argmax(1) == y).sum()
    method.train(mode)
    loss, right = (total / max(1, len(split))).tolist()
    return Score(loss, right)


@torch.no_grad()
def without_task_id(method: Method, split: Split, tasks: Sequence[int]) -> float:
    """The accuracy when nobody says which of `tasks` an example belongs to: the best of all their classes is the answer.

    With a shared head the tasks' answers mean the same classes, so only the class has to be right.
    """
    assert isinstance(split.task, int)
    mode = method.training
    method.eval()
    right = torch.zeros((), dtype=torch.int64, device=split.y.device)
    for index in torch.split(torch.arange(len(split), device=split.y.device), BATCH):
        x, y = split.inputs(index), split.y[index]
        best = [method(x, task).max(1) for task in tasks]  # (value, class) per task
        winner = torch.stack([value for value, _ in best]).argmax(0)
        answer = torch.stack([label for _, label in best]).gather(0, winner[None])[0]
        same = answer == y
        if not method.net.shared:
            same &= winner == list(tasks).index(split.task)
        right += same.sum()
    method.train(mode)
    return right.item() / len(split)
