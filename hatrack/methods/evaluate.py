"""The loss and the accuracy of a method on a data set, with and without a task id."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hatrack.methods.method import Method
from hatrack.methods.modes import evaluation_mode
from hatrack.tasks.device import split_to_device
from hatrack.tasks.split import Split
from hatrack.tasks.task import Task

BATCH = 1000  # images per forward pass


class Score(NamedTuple):
    """What `evaluate` returns.

    Attributes:
        loss: the mean cross-entropy.
        accuracy: the share of the images that are classified correctly.
    """

    loss: float
    accuracy: float


class Evaluation:
    """Evaluates a method on a data set, as often as it is called.

    Args:
        method: the method.
        split: the data set, on the device of the method.
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
        """Add the loss and the number of correct answers of a batch to the total."""
        task = self.split.task if isinstance(self.split.task, int) else self.split.task[index]
        logits, y = self.method(self.split.inputs(index), task), self.split.y[index]
        self.total[0] += F.cross_entropy(logits, y, reduction="sum")
        self.total[1] += (logits.argmax(1) == y).sum()
        return self.total

    @torch.no_grad()
    def __call__(self) -> Score:
        """Return mean cross-entropy and accuracy, in evaluation mode; the device is waited for once."""
        self.total.zero_()
        with evaluation_mode(self.method):
            for index in self.batches:
                self.add(index)
        if self.wait:
            self.wait()
        loss, right = (self.total / max(1, len(self.split))).tolist()
        return Score(loss, right)

    def forget_recording(self) -> None:
        """Free the memory of what `wrap` recorded."""
        self.add = self._add


def evaluate(method: Method, split: Split) -> Score:
    """Evaluate a method on a data set.

    Args:
        method: the method; it is evaluated in evaluation mode and left in the mode it was in.
        split: the `test`, `valid` or `train` part of a task; it is brought to the device of the method.

    Returns:
        The mean cross-entropy and the accuracy, as `loss` and `accuracy`.

    Example:
        >>> method = hr.HAT(hr.Network(trunk, tasks=tasks))
        >>> result = method.learn(tasks[0], hr.Trainer(hr.Regime(epochs=2)))
        >>> score = hr.evaluate(method, tasks[0].test)
        >>> 0 <= score.accuracy <= 1
        True
    """
    if isinstance(split, Task):
        raise ValueError("evaluate takes a part of a task: its .test, .valid or .train")
    if not len(split):
        raise ValueError("there are no images to evaluate on; a task made with valid=0 has no validation data")
    return Evaluation(method, split_to_device(split, method.net.example.device))()


@torch.no_grad()
def without_task_id(method: Method, split: Split, tasks: Sequence[int]) -> float:
    """Return the accuracy if it is unknown which of `tasks` an example belongs to: the class with the largest logit wins.

    With a shared head the outputs of all tasks mean the same classes, so only the class has to be right.

    Args:
        method: the method.
        split: the data set of one task; it is brought to the device of the method.
        tasks: the numbers of the tasks to choose from.
    """
    split = split_to_device(split, method.net.example.device)
    assert isinstance(split.task, int)
    right = torch.zeros((), dtype=torch.int64, device=split.y.device)
    with evaluation_mode(method):
        for index in torch.split(torch.arange(len(split), device=split.y.device), BATCH):
            x, y = split.inputs(index), split.y[index]
            best = [method(x, task).max(1) for task in tasks]  # (value, class) per task
            winner = torch.stack([value for value, _ in best]).argmax(0)
            answer = torch.stack([label for _, label in best]).gather(0, winner[None])[0]
            same = answer == y
            if not method.net.shared:
                same &= winner == list(tasks).index(split.task)
            right += same.sum()
    return right.item() / len(split)
