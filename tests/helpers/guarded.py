"""Small backbones, tasks and a plain training loop, to be run under a guard."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hatrack as hr
from hatrack import Guard

WIDTH = 20  # of features


class Residual(nn.Module):
    """Two linear layers with a shortcut and a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(16, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x.flatten(1)))
        return x + self.third(F.relu(self.norm(self.second(x))))


class Recurrent(nn.Module):
    """A GRU over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x.squeeze(1))[0][:, -1]


class Transformer(nn.Module):
    """One block of attention over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 24, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.embed(x.squeeze(1))).mean(1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8)),
        *(nn.ReLU(), nn.Flatten(), nn.Linear(32, WIDTH), nn.ReLU()),
    )


BACKBONES: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "residual": Residual,
    "gru": Recurrent,
    "transformer": Transformer,
}


def data(number: int, kind: str = "classes", count: int = 48) -> tuple[Tensor, Tensor]:
    """Inputs (count, 1, 4, 4) around a centre per class, and targets of a kind: "classes", "labels" or "values"."""
    draw = torch.Generator().manual_seed(number)
    y = torch.arange(count) % 3
    x = (torch.randn(3, 16, generator=draw)[y] + 0.3 * torch.randn(count, 16, generator=draw)).view(count, 1, 4, 4)
    targets = {"classes": y, "labels": F.one_hot(y, 3).float(), "values": x.flatten(1)[:, :3]}
    return x, targets[kind]


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "classes": F.cross_entropy,
    "labels": F.binary_cross_entropy_with_logits,
    "values": F.mse_loss,
}
PROBE = data(99, count=8)[0]


@dataclass
class Loop:
    """A backbone, a head per task, an optimizer and a guard, with a plain loop; what tasks answered is kept."""

    guard: Guard
    optimizer: torch.optim.Optimizer
    heads: dict[str, nn.Module]
    answers: dict[str, Tensor] = field(default_factory=dict)

    @property
    def backbone(self) -> nn.Module:
        return self.guard.backbone

    def batches(self, number: int, kind: str = "classes", size: int = 12) -> list[tuple[Tensor, Tensor]]:
        x, y = data(number, kind)
        return list(zip(x.split(size), y.split(size), strict=True))

    def train(self, name: str, batches: Iterable[Any], *, kind: str = "classes", set_to_none: bool = True) -> None:
        """One epoch, as users write it."""
        self.backbone.train()
        for x, y in batches:
            loss = LOSSES[kind](self.heads[name](self.backbone(x)), y)
            self.optimizer.zero_grad(set_to_none=set_to_none)
            loss.backward()
            self.optimizer.step()

    def learn(self, name: str, number: int = 0, *, epochs: int = 3, kind: str = "classes", **options: Any) -> None:
        """Learn a task, and keep what it answers."""
        batches = self.batches(number, kind)
        with self.guard.learn(name, steps=len(batches), own=[self.heads[name]], settle=batches):
            for _ in range(epochs):
                self.train(name, batches, kind=kind, **options)
        self.answers[name] = self.answer(name)

    @torch.no_grad()
    def answer(self, name: str) -> Tensor:
        with self.guard.use(name):
            return self.heads[name](self.backbone(PROBE))

    def changed(self) -> list[str]:
        """Return the tasks that answer with other bits than when they were learned, or whose digest differs."""
        self.guard.verify()
        return [name for name, then in self.answers.items() if not torch.equal(then, self.answer(name))]


def make_loop(
    backbone: str | nn.Module = "mlp",
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    *,
    names: str = "abcde",
    method: str = "hat",
    options: dict[str, Any] | None = None,
    seed: int = 0,
    **settings: Any,
) -> Loop:
    """Return a loop on a small backbone; its optimizer holds the backbone and the heads of all tasks from the beginning."""
    torch.manual_seed(seed)
    module = BACKBONES[backbone]() if isinstance(backbone, str) else backbone
    heads: dict[str, nn.Module] = {name: nn.Linear(WIDTH, 3) for name in names}
    held = [*module.parameters(), *(p for head in heads.values() for p in head.parameters())]
    own = optimizer(held, **{"lr": 0.01, **settings})
    guard = hr.protect(module, own, example=PROBE[:2], method=method, seed=seed, **(options or {}))  # type: ignore[arg-type]
    return Loop(guard, own, heads)


def state(*modules: nn.Module) -> dict[str, Tensor]:
    """Return copies of all tensors of some modules."""
    return {
        f"{place} {name}": tensor.detach().clone()
        for place, module in enumerate(modules)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }


def differing(one: dict[str, Tensor], two: dict[str, Tensor]) -> list[str]:
    """Return the names of the tensors that differ in a bit."""
    return [name for name in {**one, **two} if name not in one or name not in two or not torch.equal(one[name], two[name])]


@contextmanager
def recorded_steps(optimizer: torch.optim.Optimizer) -> Iterator[list[dict[str, Any]]]:
    """Collect the gradients that every step of an optimizer begins with."""
    found: list[dict[str, Any]] = []

    def look(own: torch.optim.Optimizer, *_: Any) -> None:
        params = [p for group in own.param_groups for p in group["params"]]
        found.append({"grads": [None if p.grad is None else p.grad.clone() for p in params]})

    hook = optimizer.register_step_pre_hook(look)
    try:
        yield found
    finally:
        hook.remove()
