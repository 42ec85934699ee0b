"""Small convolutional networks on made-up pictures, and whether two of them are equal, bit for bit."""

import torch
from torch import nn

from hatrack import HAT, Network, Regime, Trainer
from hatrack.seeds import seeded
from hatrack.tasks.device import all_to_device
from hatrack.tasks.task import Task
from tests.helpers.learning import logits
from tests.helpers.toys import toy_tasks

HARD = {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1, "keep_state": True}  # moves every weight that it can reach


def convolutional(tasks: list[Task], device: str = "cpu", dropout: float = 0.2) -> HAT:
    """HAT on a small network of the usual layers."""
    with seeded(0, "weights"):
        trunk = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Dropout(dropout), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(144, 24), nn.ReLU(),
        )  # fmt: skip
    net = Network(trunk, [task.classes for task in tasks], tasks[0].train.inputs(torch.arange(2)))
    return HAT(net).to(device)


def pictures(count: int = 3) -> list[Task]:
    return toy_tasks(count, shape=(3, 12, 12))


def learned(engine: str, device: str = "cpu", dropout: float = 0.2) -> tuple[HAT, bool]:
    """The method after three tasks, and whether the first one has the same logits as before the others were learned."""
    tasks = all_to_device(pictures(), device)
    method = convolutional(pictures(), device, dropout)
    fit = Trainer(Regime(epochs=4, batch=16, **HARD), engine=engine)
    method.learn(tasks[0], fit)
    first = logits(method, tasks[0])
    assert first.std() > 0.01, "logits that differ between images"
    for task in tasks[1:]:
        method.learn(task, fit)
    return method, torch.equal(first, logits(method, tasks[0]))


def assert_same_bits(one: HAT, two: HAT) -> None:
    for key, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[key]), key
