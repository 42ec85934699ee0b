"""A network for a sequence of tasks: any trunk (images to a feature vector) and a head per task, or one head for all."""

import copy
import fnmatch
import operator
from collections.abc import Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from hatrack.networks import Init
from hatrack.networks.heads import by_task
from hatrack.networks.initial_weights import initialise
from hatrack.networks.preprocessing import Preprocessing
from hatrack.seeds import seeded
from hatrack.tasks.split import TaskId
from hatrack.tasks.task import Task
from hatrack.tracing.units import last_layer


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
        if isinstance(classes, int):
            raise ValueError(f"classes are a list, of one number per task, such as [{classes}], not {classes}")
        if heads == "shared" and not classes:
            raise ValueError("heads='shared' needs the classes of the first task: the head that all share is made for them")
        for name, value in trunk.state_dict().items():
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"the trunk's state holds {name!r}, of type {type(value).__name__}: only tensors can be kept"
                )
        self.trunk, self.shared, self.init, self.seed = trunk, heads == "shared", init, seed
        example = torch.as_tensor(example)
        where = next((p.device for p in trunk.parameters()), example.device)
        self.register_buffer("example", example.to(where, copy=True), persistent=False)
        self.features = self._features()
        self.preprocessing = Preprocessing(tuple(self.example.shape[1:]), where)
        self.frozen = self._freeze([pattern.strip() for pattern in freeze.split(",") if pattern.strip()])
        self.classes: list[int] = []
        self.heads = nn.ModuleList()  # of nn.Linear: one per task, or a single one
        for count in classes:
            self.add_task(count)

    @classmethod
    def from_classifier(cls, model: nn.Module, classes: Sequence[int], example: Tensor, **options: Any) -> Self:
        """A network from a classifier as it comes: a copy of it without its own last layer, which the heads replace.

        The last layer is the one whose units are the outputs, in order; it may be a convolution that is pooled afterwards.
        """
        trunk = copy.deepcopy(model)
        name = last_layer(trunk, torch.as_tensor(example))
        parent, _, own = name.rpartition(".")
        setattr(trunk.get_submodule(parent), own, nn.Identity())
        return cls(trunk, classes, example, **options)

    def _features(self) -> int:
        mode = self.trunk.training
        with torch.no_grad():
            try:
                out = self.trunk.eval()(self.example)
            except RuntimeError:
                self.check_precision(self.example, "the example")
                raise
        self.trunk.train(mode)
        if not isinstance(out, Tensor) or out.dim() != 2 or len(out) != len(self.example):
            got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(f"the trunk must turn a batch of images into (batch, features), not {got}")
        return out.shape[1]

    def _freeze(self, patterns: Sequence[str]) -> list[str]:
        """Stop the named parts: no gradient, and always in evaluation mode, so that statistics stay as well."""

        def matches(name: str, pattern: str) -> bool:  # a part is frozen with what it lies in
            pieces = name.split(".")
            return any(fnmatch.fnmatchcase(".".join(pieces[: k + 1]), pattern) for k in range(len(pieces)))

        modules: list[str] = []
        for pattern in patterns:
            found = [p for name, p in self.trunk.named_parameters() if matches(name, pattern)]
            inside = [name for name, _ in self.trunk.named_modules() if matches(name, pattern)]
            if not found and not inside:
                top = [name for name, _ in self.trunk.named_children()]
                raise ValueError(f"freeze={pattern!r} matches no part of the trunk; its parts are: {', '.join(top)}")
            for parameter in found:
                parameter.requires_grad_(False)
            modules += inside
        return modules

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.keep_frozen(self.trunk)
        return self

    def keep_frozen(self, trunk: nn.Module) -> None:
        """The frozen parts of the trunk, or of a copy of it, in evaluation mode."""
        for name in self.frozen:
            trunk.get_submodule(name).eval()

    @torch.inference_mode(False)
    def add_task(self, classes: int) -> int:
        """Room for one more task; returns its number."""
        try:
            classes = operator.index(classes)
        except TypeError:
            raise ValueError(f"the classes of a task are counted by a whole number, not {classes!r}") from None
        if classes < 1:
            raise ValueError(f"a task has at least one class, not {classes}")
        if self.shared and len(self.heads):
            if classes > self.classes[0]:
                raise ValueError(f"the shared head has {self.classes[0]} outputs, too few for {classes} classes")
        else:
            self.heads.append(self.new_head(len(self.heads), classes))
        self.classes.append(classes)
        self.preprocessing.add_task()
        return len(self.classes) - 1

    def check_task_id(self, task: int) -> None:
        """Raise an error in one line if the network has no such task."""
        if not 0 <= task < len(self.classes):
            raise IndexError(f"no task {task}: the network has {len(self.classes)} (add_task makes room for one more)")

    def check_task(self, task: Task) -> None:
        """Raise an error in one line if the network has no place for this task."""
        if not 0 <= task.index < len(self.classes):
            raise ValueError(
                f"task {task.name!r} has number {task.index}, but the network knows {len(self.classes)}: add_task makes room"
            )
        room = max(self.classes) if self.shared else self.classes[task.index]
        if task.classes > room:
            raise ValueError(f"task {task.name!r} has {task.classes} classes, but its head has {room} outputs")
        if task.shape != tuple(self.example.shape[1:]):
            raise ValueError(
                f"task {task.name!r} has images of shape {task.shape}, but the example was {tuple(self.example.shape[1:])}"
            )

    def check_precision(self, images: Tensor, what: str) -> None:
        """After an error: another one, in one line, if the trunk computes in another precision than that of these images."""
        kinds = {p.dtype for p in self.trunk.parameters() if p.is_floating_point()}
        if kinds and images.dtype not in kinds:
            seen, own = (str(kind).removeprefix("torch.") for kind in (images.dtype, min(kinds, key=str)))
            raise ValueError(f"{what}: images are {seen}, but the trunk's weights {own}; trunk.float() makes them float32")

    def set_preprocessing(self, task: Task) -> None:
        """Remember how this task's raw images are transformed, for `preprocess`."""
        self.preprocessing.set(task.index, task.train.transform, task.train.x[0].numel())

    def preprocess(self, images: Tensor, task: TaskId) -> Tensor:
        """Raw images (uint8, or float in the units of the task's own data) as the network sees them."""
        if isinstance(task, int):
            self.check_task_id(task)
        return self.preprocessing(images, task)  # type: ignore[no-any-return]

    def new_head(self, number: int, classes: int | None = None, *, features: int | None = None) -> nn.Linear:
        """A head as it is before any training, on the trunk's features or so many of a method's own; its weights depend on
        the seed and its number only."""
        with seeded(self.seed, "head", number):
            head = nn.Linear(features or self.features, classes or self.classes[number])
            initialise(head, self.init)
        return head.to(self.example.device)

    def shared_parameters(self) -> list[nn.Parameter]:
        """The parameters that tasks train in common: the trunk's, and a shared head's. A head of a single task gets no
        gradient from the others, so that nothing has to hold it."""
        heads = self.heads.parameters() if self.shared else ()
        return [p for p in (*self.trunk.parameters(), *heads) if p.requires_grad]

    def reset_head(self, task: int) -> None:
        """A task's own head as it was before any training."""
        if not self.shared:
            self.heads[task].load_state_dict(self.new_head(task).state_dict())

    def head(self, features: Tensor, task: TaskId) -> Tensor:
        """Logits (batch, classes of the task). For one task per example they are as wide as the widest of the tasks;
        the places that a task does not own hold the lowest finite number, never minus infinity."""
        if isinstance(task, int):
            self.check_task_id(task)
        if self.shared:
            return self.heads[0](features)  # type: ignore[no-any-return]
        if isinstance(task, int):
            return self.heads[task](features)  # type: ignore[no-any-return]
        return by_task([head(features) for head in self.heads], task)

    def forward(self, x: Tensor, task: TaskId) -> Tensor:
        return self.head(self.trunk(x), task)
