"""A network for a sequence of tasks: any trunk (images to a feature vector) and a head per task, or one head for all.

A head of all classes (heads="class") grows by the classes of every task: its rows for the classes of task k are `heads[k]`,
so that their initial weights depend on the seed and the number of the task only, and files hold them like heads of tasks.
"""

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self, cast, get_args

import torch
from torch import Tensor, nn

from hatrack.networks import Heads, Init
from hatrack.networks.adapters import frozen_norms
from hatrack.networks.arguments import check_arguments, check_classes
from hatrack.networks.description import describe
from hatrack.networks.freezing import freeze_parts
from hatrack.networks.heads import by_task, heads_by_task
from hatrack.networks.initial_weights import initialise
from hatrack.networks.packed_heads import PackedHeads
from hatrack.networks.preprocessing import Preprocessing, as_example, as_raw, classes_and_example
from hatrack.networks.trunk import check_gradients, check_tensors, count_features, warn_of_unregistered, without_last_layer
from hatrack.options import whole
from hatrack.seeds import seeded
from hatrack.tasks.split import TaskId
from hatrack.tasks.targets import CLASSES, Target
from hatrack.tasks.task import Task
from hatrack.tracing.exchange import functional_call


class Network(nn.Module):
    """A trunk, which turns images into a feature vector, and a head per task. A method trains it.

    Its classes and its example come from `tasks`, or are given as `classes` and `example`.

    Args:
        trunk: any module from a batch of images to (batch, features).
        classes: the number of classes of every task; `add_task` adds others later.
        example: one or more images, on which the trunk is run once. Bytes (uint8) are brought to channels first and scaled
            to [0, 1]; others are taken as the trunk gets them.
        tasks: the tasks, in place of `classes` and `example`.
        heads: "multi" gives every task a head of its own, "shared" one head to all of them, with the same classes. "class"
            is one head of the classes of all tasks, which are counted on from task to task: see `in_scenario`.
        init: the initial weights of the heads: PyTorch's ("default") or Xavier uniform with zero biases ("xavier").
        freeze: parts of the trunk that stay exactly as they are, pretrained layers for example: patterns of names such as
            "features.*", separated by commas.
        seed: decides the initial weights of the heads.

    Attributes:
        classes: the number of classes of every task.
        features: the width of the feature vector.
        shared: whether all tasks share one head with the same classes.
        incremental: whether there is one head of the classes of all tasks.

    Example:
        >>> trunk = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 50), torch.nn.ReLU())
        >>> hr.Network(trunk, tasks=tasks)
        Network(Sequential, 39,913 parameters, images 1x28x28, 2 tasks: 10, 3 classes)
        >>> net = hr.Network(trunk, [10, 3], example=x_train[:2])  # the same
        >>> net.add_task(5)
        2
    """

    example: Tensor

    def __init__(
        self,
        trunk: nn.Module,
        classes: Sequence[int] | None = None,
        example: Any = None,
        *,
        tasks: Sequence[Task] | None = None,
        heads: Heads = "multi",
        init: Init = "default",
        freeze: str = "",
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_arguments(trunk, freeze, seed, init)
        if heads not in get_args(Heads):
            raise ValueError(f"heads must be 'multi', 'shared' or 'class', not {heads!r}")
        classes, example = classes_and_example(classes, example, tasks)
        if heads == "shared" and not classes:
            raise ValueError("heads='shared' needs the classes of the first task: the head that all share is made for them")
        check_tensors(trunk)
        self.trunk, self.init, self.seed = trunk, init, seed
        self.shared, self.incremental = heads == "shared", heads == "class"
        where = next((p.device for p in trunk.parameters()), example.device)
        self.register_buffer("example", example.to(where, copy=True), persistent=False)
        self.features = self._features()
        warn_of_unregistered(trunk)  # after a pass: recurrent layers renew a list of their weights in it
        self.preprocessing = Preprocessing(tuple(self.example.shape[1:]), where, tokens=self.example.dtype == torch.int64)
        self.frozen = [*freeze_parts(trunk, freeze), *frozen_norms(trunk)]
        check_gradients(trunk)
        self.classes: list[int] = []
        self.in_use = 0  # while a task is learned: of how many tasks there can be examples in a batch; otherwise 0
        self.mixed: Collection[int] = ()  # the tasks whose heads batches train that mix tasks: see `packed_heads.py`
        self.packed: PackedHeads | None = None  # their heads, while a fit has them together
        self.targets: dict[int, Target] = {}  # of learned tasks that ask for something else than plain classes
        self.example_task: int | None = None  # the task whose first training images are the example, once it was learned
        self.trunk_in_file: dict[str, Any] | None = None  # what a loaded file says of how the trunk is built
        self.heads = nn.ModuleList()  # of nn.Linear: one per task, or a single one; of "class", the rows of each task
        for count in classes:
            self.add_task(count)

    @classmethod
    def from_classifier(
        cls,
        model: nn.Module,
        classes: Sequence[int] | None = None,
        example: Any = None,
        *,
        tasks: Sequence[Task] | None = None,
        **options: Any,
    ) -> Self:
        """Make a network of a classifier: of a copy of it without its last layer, which the heads replace.

        The last layer is the one whose units are the outputs, in order; it may be a convolution that is pooled afterwards.

        Args:
            model: the classifier; it is not changed.
            classes: the number of classes of every task.
            example: one or more images, see `Network`.
            tasks: the tasks, in place of `classes` and `example`.
            options: `heads`, `init`, `freeze` and `seed` of the network.

        Returns:
            The network.

        Example:
            >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 50), torch.nn.Linear(50, 1000))
            >>> hr.Network.from_classifier(model, tasks=tasks).features
            50
        """
        classes, example = classes_and_example(classes, example, tasks)
        check_arguments(model, "", 0, "")
        check_tensors(model)
        return cls(without_last_layer(model, example), classes, example, **options)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle holds: all but what a fit has put together for its steps."""
        return {**self.__dict__, "mixed": (), "packed": None}

    def __repr__(self) -> str:
        return describe(self)

    def _features(self) -> int:
        """Return the width of the feature vector."""
        return count_features(self.trunk, self.example)

    @property
    def kind(self) -> Heads:
        """The argument `heads` with which the network was built."""
        return "shared" if self.shared else "class" if self.incremental else "multi"

    @property
    def needs_no_task(self) -> bool:
        """Whether logits can be computed without knowing the task: all tasks have one head."""
        return self.shared or self.incremental

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode; frozen parts stay in evaluation mode."""
        super().train(mode)
        self.keep_frozen(self.trunk)
        return self

    def keep_frozen(self, trunk: nn.Module) -> None:
        """Set the frozen parts of the trunk, or of a copy of it, to evaluation mode."""
        for name in self.frozen:
            trunk.get_submodule(name).eval()

    @torch.inference_mode(False)
    def add_task(self, classes: int) -> int:
        """Make room for one more task.

        Args:
            classes: how many classes it has.

        Returns:
            The number of the task, for `Task.from_arrays`.
        """
        try:
            classes = operator.index(classes)
        except TypeError:
            raise ValueError(f"the classes of a task are counted by a whole number, not {classes!r}") from None
        check_classes(classes)
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
        if not 0 <= whole("a task's number", task) < len(self.classes):
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
        if task.target is not CLASSES and task.classes != room:  # its losses compare every output with a label of its own
            raise ValueError(
                f"task {task.name!r} has {task.classes} outputs, but its head {room}: net.add_task({task.classes}) makes one"
            )
        first = sum(self.classes[: task.index]) if self.incremental else 0
        if task.first != first:
            raise ValueError(
                f"the labels of task {task.name!r} count from {task.first}, but in a network with heads={self.kind!r} they "
                f"count from {first}: in_scenario(tasks, {'class' if self.incremental else 'task'!r}) makes such tasks"
            )
        if self.needs_no_task and task.target is not CLASSES:
            raise ValueError(f"task {task.name!r} asks for something else than plain classes: it needs a head of its own")
        if task.shape != tuple(self.example.shape[1:]):
            raise ValueError(
                f"task {task.name!r} has images of shape {task.shape}, but the example was {tuple(self.example.shape[1:])}"
            )
        if (task.train.x.dtype == torch.int64) != self.preprocessing.tokens:
            kinds = ("images", "token ids") if self.preprocessing.tokens else ("token ids", "images")
            raise ValueError(f"task {task.name!r} has {kinds[0]}, but the example was {kinds[1]}")

    def set_preprocessing(self, task: Task) -> None:
        """Remember how this task's raw images are transformed, for `preprocess`."""
        self.preprocessing.set(task.index, task.train.transform, task.train.x[0].numel())

    def set_target(self, task: Task) -> None:
        """Remember what this task asks for, for `answer`."""
        self.targets.pop(task.index, None)
        if task.target is not CLASSES:
            self.targets[task.index] = task.target

    def note_example(self, task: Task) -> None:
        """Remember whether the example consists of this task's training images, which a file of the network then holds."""
        some = torch.arange(min(len(self.example), len(task.train)), device=task.train.y.device)
        seen = task.train.inputs(some).to(self.example)
        if seen.shape == self.example.shape and torch.allclose(seen, self.example, rtol=1e-4, atol=1e-5):
            self.example_task = task.index

    def replace_example(self, images: Any) -> None:
        """Take other images as the example. No weight and no answer changes, but certificates hold answers on the example.

        Args:
            images: as many images as the example has, of its shape; noise serves as well. Bytes (uint8) are scaled to
                [0, 1], others are taken as the trunk gets them.

        Raises:
            ValueError: if the images have another shape, or values that are NaN or infinite.

        Example:
            >>> net = hr.Network(trunk, tasks=tasks)
            >>> net.replace_example(torch.randn(2, 1, 28, 28))
        """
        new = as_example(images).to(self.example)
        if new.shape != self.example.shape:
            raise ValueError(f"the example must be of shape {tuple(self.example.shape)}, not {tuple(new.shape)}")
        self.example.copy_(new)
        self.example_task = None

    def answer(self, outputs: Tensor, task: TaskId) -> Tensor:
        """Return what outputs mean: the class of each example, or what else its task was learned for.

        Args:
            outputs: (n, outputs of the task), as `forward` returns them.
            task: the number of the task, or a tensor of numbers, one per example, if all have classes.
        """
        if isinstance(task, int):
            return self.targets.get(task, CLASSES).to(outputs.device).answer(outputs)
        if others := [k for k in set(task.tolist()) if self.targets.get(k, CLASSES).kind != "classes"]:
            raise ValueError(
                f"task {others[0]} has the target {self.targets[others[0]].kind!r}: answers of different kinds need a call "
                "per task"
            )
        return outputs.argmax(1)

    def preprocess(self, images: Any, task: TaskId) -> Tensor:
        """Return what the network sees of raw images.

        Args:
            images: an array or tensor of uint8, or of floats in the units of the task's own data; not normalised. Colour
                images may have their channels last.
            task: the number of the task, or a tensor of numbers, one per image.

        Returns:
            Images (n, *shape of the example), float.
        """
        if not isinstance(task, Tensor):
            self.check_task_id(task)
            task = operator.index(task)
        return self.preprocessing(as_raw(images, self.example), task)  # type: ignore[no-any-return]

    def new_head(self, number: int, classes: int | None = None, *, features: int | None = None) -> nn.Linear:
        """Make a head as it is before any training; its weights depend on the seed and its number only.

        Args:
            number: the number of the head.
            classes: its outputs; by default the classes of the task with this number.
            features: its inputs; by default the features of the trunk.
        """
        with seeded(self.seed, "head", number):
            head = nn.Linear(features or self.features, classes or self.classes[number], dtype=torch.float32)
            initialise(head, self.init)
        return head.to(self.example.device)

    def shared_parameters(self, last: int | None = None) -> list[nn.Parameter]:
        """Return the parameters that all tasks train: the trunk's, then those of the one head that all tasks have. The head
        of a single task gets no gradient from the others, so that no method has to protect it.

        Args:
            last: with one head of all classes, the task up to whose classes its rows are returned; None: all rows.
        """
        rows = list(self.heads)[: None if last is None or self.shared else last + 1]
        heads = [p for head in rows for p in head.parameters()] if self.needs_no_task else []
        return [p for p in (*self.trunk.parameters(), *heads) if p.requires_grad]

    def reset_head(self, task: int) -> None:
        """Give a task's own head the weights that it had before any training."""
        if not self.needs_no_task:
            self.heads[task].load_state_dict(self.new_head(task).state_dict())

    def head(self, features: Tensor, task: TaskId) -> Tensor:
        """Return logits (batch, classes of the task) from features.

        If `task` has a number per example, logits are as wide as those of the widest task; the places that a task does not
        own hold the lowest finite number, never minus infinity.

        With heads="class" they are the logits of all classes up to those of the task; for a tensor, of all classes.
        """
        if isinstance(task, int):
            self.check_task_id(task)
        kind = cast("nn.Linear", self.heads[0]).weight.dtype
        if features.dtype != kind and not torch.is_autocast_enabled(features.device.type):  # a trunk of 16 bits, say
            features = features.to(kind)
        if self.shared:
            return self.heads[0](features)  # type: ignore[no-any-return]
        if self.incremental:
            rows = list(self.heads)[: task + 1 if isinstance(task, int) else None]
            return torch.cat([head(features) for head in rows], 1)
        if self.packed is not None and self.packed.in_step:
            return self.packed(features, task)
        if isinstance(task, int):
            return self.heads[task](features)  # type: ignore[no-any-return]
        if self.in_use and self.training and torch.is_grad_enabled():  # a step; a callback may ask for any task
            return heads_by_task(cast("list[nn.Linear]", list(self.heads)[: self.in_use]), features, task)
        return by_task([head(features) for head in self.heads], task)

    def run_with(self, tensors: Mapping[str, Tensor], x: Tensor, task: int) -> Tensor:
        """Return the logits of a task with some tensors of the trunk, or of a shared head, exchanged; their names are those
        in the network. Heads of other tasks are not looked through: after many tasks this would take longer than the call.
        """
        if self.shared:
            return functional_call(self, tensors, (x, task))  # type: ignore[no-any-return]
        of_trunk = {name.removeprefix("trunk."): tensor for name, tensor in tensors.items()}
        return self.head(functional_call(self.trunk, of_trunk, (x,)), task)

    def forward(self, x: Tensor, task: TaskId) -> Tensor:
        """Return the logits of a task for images as the network sees them."""
        return self.head(self.trunk(x), task)
