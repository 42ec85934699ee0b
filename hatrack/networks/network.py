"""A network for a sequence of tasks: any trunk (images to a feature vector) and a head per task, or one head for all."""

import fnmatch
from collections.abc import Sequence
from typing import Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hatrack.networks.init import Init, initialise
from hatrack.seeds import seeded
from hatrack.task import TaskId


class Network(nn.Module):
    """`Network(trunk, classes=[10, 43], example=x[:2])`; a task that comes later: `net.add_task(5)`.

    `heads="shared"` gives every task the same head. `freeze` names parts of the trunk (patterns such as "features.*",
    separated by commas) that stay exactly as they are, pretrained layers for example.
    """

    example: Tensor

    def __init__(
        self,
        trunk: nn.Module,
        classes: Sequence[int],
        example: Tensor,
        *,
        heads: Literal["multi", "shared"] = "multi",
        init: Init = "default",
        freeze: str = "",
        seed: int = 0,
    ) -> None:
        super().__init__()
        if heads not in ("multi", "shared"):
            raise ValueError(f"heads must be 'multi' or 'shared', not {heads!r}")
        self.trunk, self.shared, self.init, self.seed = trunk, heads == "shared", init, seed
        self.register_buffer("example", example.clone(), persistent=False)
        self.features = self._features()
        self.frozen = self._freeze([pattern.strip() for pattern in freeze.split(",") if pattern.strip()])
        self.classes: list[int] = []
        self.heads = nn.ModuleList()  # of nn.Linear: one per task, or a single one
        for count in classes:
            self.add_task(count)

    def _features(self) -> int:
        mode = self.trunk.training
        with torch.no_grad():
            out = self.trunk.eval()(self.example)
        self.trunk.train(mode)
        if not isinstance(out, Tensor) or out.dim() != 2:
            got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(f"the trunk must turn a batch of images into (batch, features), not {got}")
        return out.shape[1]

    def _freeze(self, patterns: Sequence[str]) -> list[nn.Module]:
        """Stop the named parts: no gradient, and always in evaluation mode, so that statistics stay as well."""

        def matches(name: str, pattern: str) -> bool:  # a part is frozen with what it lies in
            pieces = name.split(".")
            return any(fnmatch.fnmatchcase(".".join(pieces[: k + 1]), pattern) for k in range(len(pieces)))

        modules = []
        for pattern in patterns:
            found = [p for name, p in self.trunk.named_parameters() if matches(name, pattern)]
            if not found:
                top = [name for name, _ in self.trunk.named_children()]
                raise ValueError(f"freeze={pattern!r} matches no parameter of the trunk; its parts are: {', '.join(top)}")
            for parameter in found:
                parameter.requires_grad_(False)
            modules += [m for name, m in self.trunk.named_modules() if name and matches(name, pattern)]
        return modules

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for module in self.frozen:
            module.eval()
        return self

    def add_task(self, classes: int) -> int:
        """Room for one more task; returns its number. The new head's weights depend on the seed and that number only."""
        if classes < 1:
            raise ValueError(f"a task has at least one class, not {classes!r}")
        self.classes.append(classes)
        if self.shared and len(self.heads):
            if classes > self.classes[0]:
                raise ValueError(f"the shared head has {self.classes[0]} outputs, too few for {classes} classes")
        else:
            with seeded(self.seed, "head", len(self.heads)):
                head = nn.Linear(self.features, classes)
                initialise(head, self.init)
            self.heads.append(head.to(self.example.device))
        return len(self.classes) - 1

    def head(self, features: Tensor, task: TaskId) -> Tensor:
        """Logits (batch, classes of the task). For one task per example they are as wide as the widest of the tasks;
        the places that a task does not own hold the lowest finite number, never minus infinity."""
        if self.shared:
            return self.heads[0](features)  # type: ignore[no-any-return]
        if isinstance(task, int):
            if not 0 <= task < len(self.heads):
                raise IndexError(f"no task {task}: the network has {len(self.heads)} (add_task makes room for one more)")
            return self.heads[task](features)  # type: ignore[no-any-return]
        return by_task([head(features) for head in self.heads], task)

    def forward(self, x: Tensor, task: TaskId) -> Tensor:
        return self.head(self.trunk(x), task)


def by_task(logits: list[Tensor], task: Tensor) -> Tensor:
    """The logits of each example's own task, out of those of every task: (batch, widest), see `Network.head`."""
    width, low = max(t.shape[1] for t in logits), torch.finfo(logits[0].dtype).min
    rows = torch.stack([F.pad(t, (0, width - t.shape[1]), value=low) for t in logits])
    return rows[task, torch.arange(len(task), device=task.device)]
