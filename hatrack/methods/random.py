"""Stratified guessing, the lower reference of the HAT paper (Serra et al., ICML 2018), https://arxiv.org/abs/1801.01423"""

import torch
from torch import Tensor
from torch.nn import functional as F

from hatrack.methods.fit import Fit
from hatrack.methods.method import Method
from hatrack.networks.heads import by_task
from hatrack.networks.network import Network
from hatrack.seeds import generator
from hatrack.tasks.split import TaskId
from hatrack.tasks.task import Task


class Random(Method):
    """Guesses a class with the frequency it had in the task's training data; nothing is trained.

    With one head of all classes it guesses one of the tasks so far, then a class of it. It is the lower
    reference for the measures of forgetting.

    Args:
        net: the network; the method trains it in place.

    Example:
        >>> method = hr.Random(hr.Network(trunk, tasks=tasks))
        >>> for task in tasks:
        ...     method.learn(task, hr.Trainer(hr.Regime(epochs=20)))

    See docs/methods/random.md for formulas, published values and results.
    """

    targets = "plain"

    exchanges = False

    frequency: Tensor  # (tasks, most classes)

    def __init__(self, net: Network) -> None:
        super().__init__(net)
        self.register_buffer("frequency", torch.zeros(0, 0, dtype=torch.float32))
        self.on_new_tasks()

    def on_new_tasks(self) -> None:
        """Make a row for every task of the network; before a task is learned, all its classes are equally likely."""
        if len(self.frequency) == len(self.net.classes):
            return
        widest = sum(self.net.classes) if self.net.incremental else max(self.net.classes)
        table = self.frequency.new_zeros(len(self.net.classes), widest, device=self.net.example.device)
        for task, classes in enumerate(self.net.classes):
            first = sum(self.net.classes[:task]) if self.net.incremental else 0
            table[task, first : first + classes] = 1 / classes
        table[: len(self.frequency), : self.frequency.shape[1]] = self.frequency
        self.frequency = table

    def learn_task(self, task: Task, fit: Fit) -> None:
        labels = torch.cat([task.train.y, task.valid.y])
        self.frequency[task.index] = labels.bincount(minlength=self.frequency.shape[1]) / len(labels)

    def forward(self, x: Tensor, task: TaskId) -> Tensor:
        """Return one-hot guesses. They depend on the position in the batch only, so a batch always gets the same guesses."""
        if isinstance(task, Tensor):
            return by_task([self(x, k) for k in range(len(self.frequency))], task)
        classes = max(self.net.classes) if self.net.shared else self.net.classes[task]
        frequency = self.frequency[task]
        if self.net.incremental:  # a task at random, then a class with its frequency in the task
            classes, frequency = sum(self.net.classes[: task + 1]), self.frequency[: task + 1].mean(0)
        source = generator(self.net.seed, "guess", task)
        guess = torch.multinomial(frequency.cpu(), len(x), replacement=True, generator=source)
        return F.one_hot(guess, classes).to(device=x.device, dtype=x.dtype)
