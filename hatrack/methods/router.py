"""The router: find the task of an image, for methods whose finished tasks never change.

It holds statistics of every finished task beside the weights (`router_scores.py`) and changes no weight: `method.fit_router`
computes them after a task was learned, `method.route` compares an image with all tasks. They lie in buffers, so that saved
files hold them; a method without a fitted router has none, and its files are as they were. `release`, `forget_task` and
learning a task again delete those of the task.
"""

import re
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from hatrack.methods.modes import evaluation_mode
from hatrack.methods.router_scores import (
    Gaussians,
    calibrated,
    calibration,
    certainty,
    energy,
    fit_gaussians,
    relative_distance,
)
from hatrack.options import choose, expect
from hatrack.tasks.device import to_device
from hatrack.tasks.split import Split
from hatrack.tasks.task import Task

if TYPE_CHECKING:
    from hatrack.methods.method import Method

Kind = Literal["distance", "both", "energy", "entropy"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SCORES = ("distance", "energy", "entropy")  # the rows of a calibration
PARTS = (*Gaussians._fields, "calibration")
IMAGES = 5000  # of the training data, and of the validation data, that a router is fitted on at most
BATCH = 500  # images per forward pass


class Answers(NamedTuple):
    """What a router says of some images: the task of each, and its class in that task."""

    task: Tensor
    label: Tensor


class Router(nn.Module):
    """The statistics of finished tasks by which `method.route` finds the task of an image; `method.router` is one.

    Args:
        device: the device of the method.
    """

    none: Tensor

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("none", torch.zeros(0, device=device), persistent=False)  # so that the device is known

    def tasks(self) -> list[int]:
        """Return the numbers of the tasks that it knows, in order."""
        return sorted(int(name.split("_")[1]) for name in self._buffers if name.endswith("_calibration"))

    def store(self, task: int, model: Gaussians, scales: Tensor) -> None:
        """Keep the statistics of a task in place of those that it had."""
        self.delete(task)
        for part, value in zip(PARTS, (*model, scales), strict=True):
            self.register_buffer(_name(task, part), value)

    def delete(self, task: int) -> None:
        """Delete the statistics of a task."""
        for part in PARTS:
            self._buffers.pop(_name(task, part), None)

    def score(self, task: int, features: Tensor, logits: Tensor, kind: Kind) -> Tensor:
        """Return how well images fit a task (images,), on the scale that is common to all tasks."""
        scales = self.get_buffer(_name(task, "calibration"))

        def one(name: str) -> Tensor:
            return calibrated(raw_score(name, features, logits, self.model(task)), scales[SCORES.index(name)])

        if kind != "both":
            return one(kind)
        # Logits that are larger than usual are no evidence: of images of other tasks they often are.
        return one("distance") + one("energy").clamp(max=0)

    def model(self, task: int) -> Gaussians:
        """Return the two models of a task's features."""
        return Gaussians(*(self.get_buffer(_name(task, part)) for part in Gaussians._fields))

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Tensor],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Take the statistics of a state_dict in place of those that are here: only the state tells which tasks have any."""
        own = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        tasks = {int(found[1]) for name in own if (found := re.fullmatch(r"task_(\d{1,9})_[a-z]+", name, re.ASCII))}
        names = {_name(task, part) for task in tasks for part in PARTS}
        unexpected_keys.extend(prefix + name for name in own if name not in names)
        missing_keys.extend(prefix + name for name in sorted(names) if name not in own)
        for task in self.tasks():
            self.delete(task)
        if not names <= own.keys():
            return
        for task in sorted(tasks):
            parts = [own[_name(task, part)].detach().to(self.none.device, copy=True) for part in PARTS]
            if _fits(*parts):
                self.store(task, Gaussians(*parts[:-1]), parts[-1])
            else:
                error_msgs.append(f"{prefix}task_{task}_*: the shapes of these tensors contradict each other")


def _name(task: int, part: str) -> str:
    return f"task_{task}_{part}"


def _fits(*parts: Tensor) -> bool:
    """Return whether the tensors of one task have shapes and types that belong together."""
    centre, basis, _, means = parts[:4]
    if basis.dim() != 2 or means.dim() != 2 or not all(part.dtype == torch.float32 for part in parts):
        return False
    k, d = basis.shape
    shapes = [(d,), (k, d), (k, k), (len(means), k), (k,), (2,), (len(SCORES), 2)]
    return [tuple(part.shape) for part in parts] == shapes and len(centre) == d and len(means) > 0


def raw_score(name: str, features: Tensor, logits: Tensor, model: Gaussians) -> Tensor:
    """Return one of SCORES (images,) in the units of a task's own features and logits."""
    if name == "distance":
        return relative_distance(features, model)
    return energy(logits) if name == "energy" else certainty(logits)


def features_and_logits(method: "Method", x: Tensor, task: int) -> tuple[Tensor, Tensor]:
    """Return what the head of a task reads (images, features), and what it makes of it.

    Args:
        method: the method, in evaluation mode; other threads must wait, as they do within `evaluation_mode`.
        x: images as the network sees them.
        task: the number of the task.
    """
    seen: list[Tensor] = []
    heads = {*method.net.heads, *getattr(method, "heads", ())}  # a method may have heads of its own
    hooks = [head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])) for head in heads]
    try:
        logits = method(x, task)
    finally:
        for hook in hooks:
            hook.remove()
    if not seen:
        raise ValueError(f"{type(method).__name__} calls no head of its network, so that a router can't see its features")
    return seen[-1], logits


@torch.no_grad()
def fit_router(method: "Method", task: Task) -> None:
    """Compute the statistics of a finished task from its training and validation data; see `Method.fit_router`."""
    expect("task", task, Task, "a Task that the method has learned")
    if method.history.get(task.index) != task.name:
        raise ValueError(f"task {task.index} ({task.name!r}) has not been learned: method.learn(task, fit) comes first")
    with evaluation_mode(method), torch.autocast(method.net.example.device.type, enabled=False):
        if not method.used_by(task.index):
            raise ValueError(
                f"{type(method).__name__} does not guarantee that finished tasks stay as they are, so that a router would "
                "not fit them any more after the next task: hat, pmask, packnet, pathnet, pnn, lora, independent and "
                "frozen do"
            )
        task = to_device(task, method.net.example.device)
        features, _, labels = _on(method, task.train)
        model = fit_gaussians(features, labels)
        features, logits, _ = _on(method, task.valid if len(task.valid) else task.train)
        scales = torch.stack([calibration(raw_score(name, features, logits, model)) for name in SCORES])
        method.router.store(task.index, model, scales)


def _on(method: "Method", split: Split) -> tuple[Tensor, Tensor, Tensor]:
    """Return features, logits and labels of some images of a split, at even distances."""
    assert isinstance(split.task, int)
    count = min(IMAGES, len(split))
    rows = torch.arange(count, device=split.y.device) * len(split) // max(1, count)
    found = [features_and_logits(method, x, split.task) for _, x in split.read(torch.split(rows, BATCH))]
    labels = split.y[rows] if split.target.kind == "classes" else torch.zeros_like(rows)  # no classes: one of all
    return torch.cat([one for one, _ in found]), torch.cat([two for _, two in found]), labels


@torch.no_grad()
def answers(method: "Method", raw: Tensor, kind: Kind) -> Answers:
    """Return the task of every raw image (images, *shape), by a kind of score, and its class in that task."""
    choose("kind of router", kind, dict.fromkeys(KINDS))
    with evaluation_mode(method), torch.autocast(raw.device.type, enabled=False):
        tasks = _askable(method, raw)
        parts = [_answer(method, part, tasks, kind) for part in torch.split(raw, BATCH)]
    return Answers(torch.cat([part.task for part in parts]), torch.cat([part.label for part in parts]))


def _askable(method: "Method", raw: Tensor) -> list[int]:
    """Return the finished tasks whose raw images have as many values as these."""
    if not method.history:
        raise ValueError("no task has been learned, so that there is none to choose from")
    if missing := [task for task in method.history if task not in method.router.tasks()]:
        raise ValueError(
            f"the router was not fitted on task {missing[0]} ({method.history[missing[0]]!r}): method.fit_router(task) does "
            "so; or name the task of the images"
        )
    sizes, size = method.net.preprocessing.raw.tolist(), raw[:1].numel() if len(raw) else None
    if not (tasks := [task for task in method.history if size in (None, sizes[task])]):
        known = ", ".join(map(str, sorted({sizes[task] for task in method.history})))
        raise ValueError(f"images have {size} values each; those of the learned tasks have {known}")
    return tasks


def _answer(method: "Method", raw: Tensor, tasks: list[int], kind: Kind) -> Answers:
    """Return task and class of the images of one batch."""
    scores, labels = [], []
    for task in tasks:
        features, logits = features_and_logits(method, method.net.preprocess(raw, task), task)
        scores.append(method.router.score(task, features, logits, kind))
        labels.append(logits.argmax(1))
    best = torch.stack(scores).argmax(0)  # (images,), positions in `tasks`
    return Answers(torch.tensor(tasks, device=raw.device)[best], torch.stack(labels).gather(0, best[None])[0])
