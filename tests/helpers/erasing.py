"""Small networks of every kind, ways to train them without a state that is kept, and comparisons of all bits of a method."""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from hatrack import METHODS, NETWORKS, Method, Network, Regime, Task, Trainer
from hatrack.methods.parts.freeze import INTEGERS, real
from hatrack.seeds import seeded
from hatrack.tasks.transform import Transform
from tests.helpers.toys import toy_tasks

SHAPES = {"mlp": (1, 4, 4), "alexnet": (3, 32, 32), "resnet18": (3, 16, 16), "vit": (1, 8, 8), "gru": (1, 8, 8)}
SMALL = {
    "mlp": {"widths": (24, 24), "dropout": 0.2, "input_dropout": 0.1},
    "alexnet": {},
    "resnet18": {"width": 4, "dropout": 0.1},
    "vit": {"width": 16, "depth": 2, "attention_heads": 2, "mlp_ratio": 2},
    "gru": {"width": 16},
}
OPTIMIZERS = {
    "sgd with decay": {"optimizer": "sgd", "lr": 0.1, "weight_decay": 0.01},
    "momentum with decay": {"optimizer": "momentum", "lr": 0.05, "weight_decay": 0.01},
    "adam": {"optimizer": "adam", "lr": 0.01},
    "adamw with decay": {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1},
}


def small_tasks(network: str = "mlp", count: int = 3) -> list[Task]:
    """Made-up tasks for a network; each transforms its images in its own way."""
    return [_transformed(task) for task in toy_tasks(count, shape=SHAPES[network], train=40, test=20)]


def _transformed(task: Task) -> Task:
    """The task with other means and standard deviations, and with the pixels in another order."""
    old, pixels = task.train.transform, torch.arange(math.prod(task.shape)).roll(task.index + 1)[None]
    new = Transform(old.shape, old.mean + 0.1 * (task.index + 1), old.std * 1.5, pixels)
    parts = {name: replace(getattr(task, name), transform=new) for name in ("train", "valid", "test")}
    return replace(task, **parts)


def build(name: str, tasks: list[Task], network: str | nn.Module = "mlp", *, seed: int = 0, **options: object) -> Method:
    """An untrained method on a small network, whose example is noise: no image of a task remains there."""
    with seeded(seed, "weights"):
        trunk = NETWORKS[network](tasks[0].shape, **SMALL[network]) if isinstance(network, str) else network
    net = Network(trunk, tasks=tasks, seed=seed)
    net.replace_example(torch.randn(net.example.shape, generator=torch.Generator().manual_seed(seed)))
    return METHODS[name](net, **options)


def trainer(optimizer: str = "momentum with decay", epochs: int = 2, **changes: object) -> Trainer:
    return Trainer(Regime(epochs=epochs, batch=16, **{**OPTIMIZERS[optimizer], **changes}))


def snapshot(method: Method) -> dict[str, Tensor]:
    """Copies of all tensors of a method, and which tasks are learned."""
    state = {name: value.detach().clone() for name, value in method.state_dict().items()}
    return state | {f"learned {task}": torch.ones(1) for task in method.history}


def different(one: dict[str, Tensor], two: dict[str, Tensor]) -> list[str]:
    """The names of the tensors that differ in any bit, also in the sign of a zero."""
    assert one.keys() == two.keys()
    return [name for name, value in one.items() if not torch.equal(bits(value), bits(two[name]))]


def bits(value: Tensor) -> Tensor:
    value = real(value.detach())
    return value.contiguous().view(INTEGERS[value.dtype]) if value.is_floating_point() else value


class Scaled(nn.Module):
    """A trunk with a weight that is computed before it is used: HAT holds it whole."""

    def __init__(self, inputs: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, 24)
        self.matrix = nn.Parameter(torch.randn(24, 24) / math.sqrt(24))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x.flatten(1)))
        return torch.relu(hidden @ (self.matrix * self.matrix.abs().mean()).t())
