"""What a task asks the network for: a class, several labels, numbers, a grade, or what a user's own loss says.

A target knows how outputs are compared with what they should be, both in training and in evaluation, and what they mean.
Its tensors lie on the device of the task, because they are used inside the training step.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from hatrack.options import shown

Kind = Literal["classes", "multi-label", "regression", "ordinal"]  # those that need no functions of the user
Able = Literal["any", "classes", "plain"]  # what a method can learn: anything, classes, or classes without weights
Compare = Callable[[Tensor, Tensor], Tensor]  # outputs and targets to one number, or to one per example


def cross_entropies(outputs: Tensor, y: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the cross-entropy of every example (batch,), also of examples of different tasks.

    Args:
        outputs: (batch, classes); of a class that the task of an example does not have, the lowest number of the type.
        y: (batch,), the labels.
        smoothing: the share of a label that is spread over the classes of its task.
    """
    if not smoothing:
        return F.cross_entropy(outputs, y, reduction="none")
    logs, own = outputs.log_softmax(1), outputs > torch.finfo(outputs.dtype).min
    spread = torch.where(own, logs, 0).sum(1) / own.sum(1)
    return -(1 - smoothing) * logs.gather(1, y[:, None])[:, 0] - smoothing * spread


@dataclass(frozen=True, eq=False)
class Target:
    """A target: one class of several per example. The others are subclasses.

    Attributes:
        weights: (classes,), how much examples of each class count; None: all the same.
        smoothing: the share of the target that is spread over all classes in training.
        batch_weight: (), the mean weight of the examples of a whole batch, for the losses of its parts; None: the weights of
            the examples at hand.
    """

    kind: ClassVar[str] = "classes"
    score: ClassVar[str] = "accuracy"  # the name of what `total_score` adds up
    meaning: ClassVar[str] = "the share of the examples that are classified correctly"

    weights: Tensor | None = None
    smoothing: float = 0.0
    batch_weight: Tensor | None = None

    def __reduce__(self) -> Any:
        """Keep plain classes the one object that other code looks for, when a task is copied or sent to another process."""
        return "CLASSES" if self is CLASSES else super().__reduce__()

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a batch in training, a 0-d tensor. With weights it is the sum of the weighted losses,
        divided by the sum of the weights, and 0 if that sum is 0."""
        if self.weights is None:
            return F.cross_entropy(outputs, y, label_smoothing=self.smoothing)
        total = F.cross_entropy(outputs, y, weight=self.weights, label_smoothing=self.smoothing, reduction="sum")
        weight = self.weights[y].sum() if self.batch_weight is None else self.batch_weight * len(y)
        none = weight == 0  # then both are 0, and so must be the gradient
        return total * ~none / (weight + none)

    def for_parts(self, y: Tensor) -> Self:
        """Return the target for parts of a batch with labels y: the mean of the parts' losses, each counted as often as it
        has examples, is the loss of the batch."""
        return self if self.weights is None else replace(self, batch_weight=self.weights[y].mean())

    def divisor(self, y: Tensor) -> float:
        """Return what the sum of the losses of a data set with labels y is divided by, for the mean as in training: the
        number of examples or, if classes have weights, the sum of their weights."""
        return len(y) if self.weights is None else float(self.weights[y].double().sum())

    @property
    def recordable(self) -> bool:
        """Whether its losses and scores can be recorded as CUDA graphs."""
        return True

    def total_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the sum of the losses of a batch in evaluation."""
        return F.cross_entropy(outputs, y, weight=self.weights, reduction="sum")

    def total_score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the sum of the scores of a batch: 1 for a right answer, 0 for a wrong one, or numbers up to 1."""
        return (outputs.argmax(1) == y).sum()

    def answer(self, outputs: Tensor) -> Tensor:
        """Return what the outputs mean."""
        return outputs.argmax(1)

    def to(self, device: torch.device | str) -> Self:
        """Return the target with its tensors on a device."""
        moved: dict[str, Any] = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved) if moved else self

    def smoothed(self, share: float) -> Self:
        """Return the target with label smoothing; raise an error if it has no classes to spread over."""
        if share and type(self) is not Target:
            raise ValueError(f"smoothing is for tasks with classes, not for the target {self.kind!r}")
        return replace(self, smoothing=share) if share else self

    def check_for(self, method: str, able: Able, task: str) -> None:
        """Raise an error in one line if a method can't learn this.

        Args:
            method: the name of the method.
            able: what it can learn.
            task: the name of the task.
        """
        if able != "any" and self.kind != "classes":
            raise ValueError(f"{method} learns tasks with classes, not {task!r}, whose target is {self.kind!r}")
        if able == "plain" and self is not CLASSES:
            raise ValueError(f"{method} learns tasks whose classes all count the same, not {task!r} with class_weights")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values from which `target_from_dict` makes the target again, but for functions of the user."""
        numbers = {name: value.tolist() for name, value in vars(self).items() if isinstance(value, Tensor)}
        return {"kind": self.kind, **numbers}


@dataclass(frozen=True, eq=False)
class MultiLabel(Target):
    """Several labels per example, each of which holds or not: outputs above 0 say that it does."""

    kind: ClassVar[str] = "multi-label"
    score: ClassVar[str] = "label accuracy"
    meaning: ClassVar[str] = "the share of all labels of all examples that are right"

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs, y)

    def total_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs, y, reduction="none").mean(1).sum()

    def total_score(self, outputs: Tensor, y: Tensor) -> Tensor:
        return ((outputs > 0) == (y > 0.5)).float().mean(1).sum()

    def answer(self, outputs: Tensor) -> Tensor:
        return outputs > 0


@dataclass(frozen=True, eq=False)
class Regression(Target):
    """One or several numbers per example. The network's outputs are in units of their spread in the training data.

    Attributes:
        mean: (numbers,), the mean of each in the training data.
        std: (numbers,), its standard deviation there.
        flat: whether an example has a number, not a list of them.

    The numbers and their mean and standard deviation are float32 or, if that is not exact enough, float64: see `spread`.
    """

    kind: ClassVar[str] = "regression"
    score: ClassVar[str] = "R²"
    meaning: ClassVar[str] = "1 less the mean squared error in units of the variance in the training data"

    mean: Tensor = field(default_factory=lambda: torch.zeros(1))
    std: Tensor = field(default_factory=lambda: torch.ones(1))
    flat: bool = False

    def _errors(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs - ((y - self.mean) / self.std).to(outputs.dtype)).square()

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return self._errors(outputs, y).mean()

    def total_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return self._errors(outputs, y).mean(1).sum()

    def total_score(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (1 - self._errors(outputs, y).mean(1)).sum()

    def answer(self, outputs: Tensor) -> Tensor:
        numbers = outputs * self.std + self.mean
        return numbers[:, 0] if self.flat else numbers

    def to_dict(self) -> dict[str, Any]:
        double = {"double": True} if self.mean.dtype == torch.float64 else {}
        return {**super().to_dict(), "flat": self.flat, **double}


@dataclass(frozen=True, eq=False)
class Ordinal(Target):
    """One of several grades in order. Output k says whether the grade is above k, so that there is one less than grades."""

    kind: ClassVar[str] = "ordinal"

    def _above(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (y[:, None] > torch.arange(outputs.shape[1], device=y.device)).to(outputs.dtype)

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs, self._above(outputs, y))

    def total_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs, self._above(outputs, y), reduction="none").mean(1).sum()

    def total_score(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (self.answer(outputs) == y).sum()

    def answer(self, outputs: Tensor) -> Tensor:
        return (outputs > 0).sum(1)


@dataclass(frozen=True, eq=False)
class Own(Target):
    """A target of the user's own.

    Attributes:
        own_loss: from outputs and targets to the mean loss, or to one per example.
        own_score: from outputs and targets to the mean score, or to one per example; larger is better. None: the loss with
            its sign changed.
    """

    kind: ClassVar[str] = "own"
    score: ClassVar[str] = "score"
    meaning: ClassVar[str] = "the mean of the score that the task was given"

    own_loss: Compare | None = None
    own_score: Compare | None = None

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        if self.own_loss is None:
            raise ValueError(
                "a target of your own that was read from a file has no loss; learn(task) takes that of the task"
            )
        return _mean("loss", self.own_loss(outputs, y), len(y))

    def total_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return self.loss(outputs, y) * len(y)

    def total_score(self, outputs: Tensor, y: Tensor) -> Tensor:
        if self.own_score is None:
            return -self.total_loss(outputs, y)
        found: Any = self.own_score(outputs, y)
        found = torch.full((), float(found), device=outputs.device) if isinstance(found, Real) else found
        return _mean("score", found.float() if isinstance(found, Tensor) else found, len(y)) * len(y)

    def answer(self, outputs: Tensor) -> Tensor:
        return outputs

    @property
    def recordable(self) -> bool:
        return self.own_score is None  # a score may be a number in Python, which a recording can't compute

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind}


def _mean(what: str, found: Any, examples: int) -> Tensor:
    """Return the mean of what a function of the user returned; raise an error unless it is a number or one per example."""
    wanted = (
        f"a task's own {what} must return a tensor with the mean or one number per example, of shape () or ({examples},)"
    )
    if not isinstance(found, Tensor):
        raise ValueError(f"{wanted}, not {shown(found)[:80]}")
    if found.shape not in ((), (examples,)):
        raise ValueError(
            f"{wanted}, not {tuple(found.shape)}; outputs have shape ({examples}, outputs): out[:, 0] is the first"
        )
    return found.mean()


def other_score(target: Target) -> str | None:
    """Return the name of a target's score; None if that is the accuracy on classes, which needs no name."""
    return None if target.kind == "classes" else target.score


def check_smoothing(tasks: Iterable[tuple[str, Target]], share: float) -> None:
    """Raise an error if label smoothing is not for one of several tasks, which are given by their names and targets."""
    for name, target in tasks:
        try:
            target.smoothed(share)
        except ValueError as error:
            raise ValueError(f"task {name!r}: {error}") from None


CLASSES = Target()
KINDS: dict[str, type[Target]] = {kind.kind: kind for kind in (Target, MultiLabel, Regression, Ordinal, Own)}


def target_from_dict(data: Mapping[str, Any]) -> Target:
    """Return the target that `Target.to_dict` described.

    Raises:
        ValueError: if it is not such a description.
    """
    kind = KINDS.get(str(data.get("kind")))
    try:
        if kind is None:
            raise ValueError
        kept = torch.float64 if data.get("double") is True else torch.float32
        numbers: dict[str, Any] = {
            k: torch.tensor(v, dtype=kept) for k, v in data.items() if k in ("mean", "std", "weights")
        }
        if any(t.dim() != 1 or not t.isfinite().all() for t in numbers.values()):
            raise ValueError
        numbers |= {"flat": bool(data["flat"])} if kind is Regression else {}
        return kind(**numbers)
    except (TypeError, ValueError, KeyError, RuntimeError):
        raise ValueError(
            f"a target must be one of {', '.join(KINDS)} with its numbers, not {str(dict(data))[:100]}"
        ) from None
