"""What a method trains with, and what comes out: Fit, FitResult and LearnResult."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import nn

from hatrack.regime import Regime
from hatrack.tasks.task import Task

if TYPE_CHECKING:
    from hatrack.methods.method import Method


class EpochResult(NamedTuple):
    """What an epoch came to; a record keeps these as curves. The validation values are None without validation data."""

    lr: float
    loss: float
    valid_loss: float | None
    valid_accuracy: float | None


@dataclass
class FitResult:
    """What a fit came to."""

    task: int
    epochs: list[EpochResult] = field(default_factory=list)
    best: int = 0  # the epoch whose weights were kept, counted from 0
    engine: str = "eager"  # how the steps ran
    halved: int = 0  # how often the fit diverged and began again with half the learning rate


class Fit(Protocol):
    """Trains a method on a task: the `fit` that `learn_task` is given. A `Trainer` is one."""

    @property
    def regime(self) -> Regime:
        """The regime of its fits."""

    def __call__(
        self, method: "Method", task: Task, *, plain: dict[nn.Parameter, float] | None = None, **changes: Any
    ) -> FitResult:
        """Train the method's parameters on the task's training data.

        Args:
            method: the method.
            task: the task.
            plain: parameters that take plain SGD steps with a learning rate of their own (scaled by the schedule), without
                decay, outside the norm that is clipped, whatever the optimizer of the others.
            changes: fields of the regime, for this fit alone: `fit(self, task, epochs=5, lr=0.01)`.

        Returns:
            What the fit came to. The method has its best weights on validation data, or its last if there is none.
        """


@dataclass(frozen=True)
class LearnResult:
    """What `Method.learn` returns.

    Attributes:
        task: the name of the task.
        fits: the result of every fit, in order; methods that prune or merge have several, `random` none.
        usage: the share of every layer that finished tasks have taken; empty if the method takes nothing.
    """

    task: str
    fits: list[FitResult]
    usage: dict[str, float]

    @property
    def epochs(self) -> int:
        """How many epochs were trained, in all fits together."""
        return sum(len(fit.epochs) for fit in self.fits)

    @property
    def best_epoch(self) -> int | None:
        """The epoch of the last fit whose weights were kept, counted from 1."""
        return self.fits[-1].best + 1 if self.fits else None

    @property
    def valid_accuracy(self) -> float | None:
        """The accuracy of that epoch on validation data."""
        last = self.fits[-1] if self.fits else None
        return last.epochs[last.best].valid_accuracy if last and last.epochs else None

    @property
    def capacity(self) -> float | None:
        """The share of the network that finished tasks have taken, the mean over its layers."""
        return sum(self.usage.values()) / len(self.usage) if self.usage else None

    def __str__(self) -> str:
        said = f"learned {self.task!r} in {self.epochs} epochs"
        said += "" if self.valid_accuracy is None else f", validation accuracy {self.valid_accuracy:.1%}"
        said += f" (epoch {self.best_epoch})" if self.best_epoch else ""
        return said + ("" if self.capacity is None else f", {self.capacity:.0%} of the capacity taken")


class CountedFit:
    """A fit that remembers its results."""

    def __init__(self, fit: Fit) -> None:
        self.fit = fit
        self.results: list[FitResult] = []

    @property
    def regime(self) -> Regime:
        return self.fit.regime

    def __call__(
        self, method: "Method", task: Task, *, plain: dict[nn.Parameter, float] | None = None, **changes: Any
    ) -> FitResult:
        self.results.append(self.fit(method, task, plain=plain, **changes))
        return self.results[-1]
