"""Small methods of every kind, and their logits."""

import pytest
import torch
from torch import Tensor

from hatrack import METHODS, Method, Network, Regime, Task, Trainer
from hatrack.networks.mlp import mlp
from hatrack.seeds import seeded

# Methods that promise to leave earlier tasks alone, bit for bit
ISOLATED = ["frozen", "independent", "hat", "pmask", "packnet", "pathnet", "pnn"]


UNTRAINED = ["random"]


MULTI_ONLY = ["frozen"]


OPTIMIZERS = {
    "sgd": {"optimizer": "sgd", "lr": 0.1},
    "kept momentum": {"optimizer": "momentum", "lr": 0.05, "keep_state": True},
    "kept adam": {"optimizer": "adam", "lr": 0.01, "keep_state": True},
    "kept adamw with decay": {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1, "keep_state": True},
}


every_method = pytest.mark.parametrize("name", METHODS)


def make(name: str, tasks: list[Task], *, seed: int = 0, known: int | None = None, heads: str = "multi") -> Method:
    """An untrained method on a small network that knows the first `known` tasks."""
    with seeded(seed, "weights"):
        trunk = mlp(tasks[0].shape, widths=(24, 24), dropout=0.2, input_dropout=0.1)
    classes = [task.classes for task in tasks[:known]]
    example = tasks[0].train.inputs(torch.arange(2))
    return METHODS[name](Network(trunk, classes, example, heads=heads, seed=seed))


def learn(method: Method, tasks: list[Task], fit: Trainer | None = None) -> Trainer:
    fit = fit or Trainer(Regime(epochs=4, batch=16, lr=0.1))
    for task in tasks:
        method.learn(task, fit)
    return fit


@torch.no_grad()
def logits(method: Method, task: Task) -> Tensor:
    method.eval()
    return method(task.test.inputs(torch.arange(len(task.test))), task.index)
