"""How well a method does on a data set: loss and accuracy, with and without a task id."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hatrack.methods.method import Method
from hatrack.tasks.split import Split
from hatrack.tasks.task import Task

BATCH = 1000  # images per forward pass


class Score(NamedTuple):
    """What `evaluate` returns."""

    loss: float  # mean cross-entropy
    accuracy: float  # share of the images that are classified correctly


class Evaluation:
    """Evaluates a method on a data set, again and again.

    Args:
        method: the method.
        split: the data set.
        wrap: applied once to the function that adds up a batch; a trainer records it here.
        wait: called before the result is read from the device.
    """

    def __init__(
        self,
        method: Method,
        split: Split,
        *,
        wrap: Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]] | None = None,
        wait: Callable[[], None] | None = None,
    ) -> None:
        self.method, self.split, self.wait = method, split, wait
        self.total = torch.zeros(2, dtype=torch.float64, device=split.y.device)
        self.batches = torch.split(torch.arange(len(split), device=split.y.device), BATCH)
        self.add: Callable[[Tensor], Tensor] = wrap(self._add) if wrap else self._add

    def _add(self, index: Tensor) -> Tensor:
        task = self.split.task if isinstance(self.split.task, int) else self.split.task[index]
        logits, y = self.method(self.split.inputs(index), task), self.split.y[index]
        self.total[0] += F.cross_entropy(logits, y, reduction="sum")
        self.total[1] += (logits.argmax(1) == y).sum()
        return self.total

    @torch.no_grad()
    def __call__(self) -> Score:
        """Mean cross-entropy and accuracy, in evaluation mode; the device is waited for once."""
        mode = self.method.training
        self.method.eval()
        self.total.zero_()
        for index in self.batches:
            self.add(index)
        self.method.train(mode)
        if self.wait:
            self.wait()
        loss, right = (self.total / max(1, len(self.split))).tolist()
        return Score(loss, right)

    def forget_recording(self) -> None:
        """Give back the memory of what `wrap` recorded."""
        self.add = self._add


def evaluate(method: Method, split: Split) -> Score:
    """Mean cross-entropy and accuracy, in evaluation mode."""
    if isinstance(split, Task):
        raise ValueError("evaluate takes a part of a task: its .test, .valid or .train")
    return Evaluation(method, split)()


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
