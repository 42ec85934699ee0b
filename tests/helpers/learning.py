"""Small methods of every kind, ways to train them, and their logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hatrack import METHODS, Method, Network, Regime, Task, Trainer
from hatrack.networks.mlp import mlp
from hatrack.seeds import seeded

# Methods that guarantee that earlier tasks do not change, bit for bit
ISOLATED = ["frozen", "independent", "lora", "hat", "pmask", "packnet", "pathnet", "pnn"]


UNTRAINED = ["random"]


MULTI_ONLY = ["frozen", "lora"]


OPTIMIZERS = {
    "sgd": {"optimizer": "sgd", "lr": 0.1},
    "kept momentum": {"optimizer": "momentum", "lr": 0.05, "keep_state": True},
    "kept adam": {"optimizer": "adam", "lr": 0.01, "keep_state": True},
    "kept adamw with decay": {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1, "keep_state": True},
}


# PathNet's 16 modules per layer take most of the time of a fit on so small a network.
SMALLER = {"pathnet": {"modules": 6}}


every_method = pytest.mark.parametrize("name", METHODS)


def make(name: str, tasks: list[Task], *, seed: int = 0, known: int | None = None, heads: str = "multi") -> Method:
    """An untrained method on a small network that knows the first `known` tasks."""
    with seeded(seed, "weights"):
        trunk = mlp(tasks[0].shape, widths=(24, 24), dropout=0.2, input_dropout=0.1)
    classes = [task.classes for task in tasks[:known]]
    example = tasks[0].train.inputs(torch.arange(2))
    return METHODS[name](Network(trunk, classes, example, heads=heads, seed=seed), **SMALLER.get(name, {}))


def learn(method: Method, tasks: list[Task], fit: Trainer | None = None) -> Trainer:
    """Learn tasks one after the other; returns the trainer, which has the results of its fits."""
    fit = fit or Trainer(Regime(epochs=4, batch=16, lr=0.1))
    for task in tasks:
        method.learn(task, fit)
    return fit


class FunctionFit:
    """A fit of a regime that calls a function instead of training: `function(method, task, **changes)`."""

    def __init__(self, function: Callable[..., Any], regime: Regime | None = None) -> None:
        self.function, self.regime = function, regime or Regime()

    def __call__(self, method: Method, task: Task, *, plain: Any = None, **changes: Any) -> Any:
        return self.function(method, task, **changes, **({} if plain is None else {"plain": plain}))


@torch.no_grad()
def logits(method: Method, task: Task) -> Tensor:
    """The logits of a method on the test images of a task."""
    method.eval()
    return method(task.test.inputs(torch.arange(len(task.test))), task.index)
