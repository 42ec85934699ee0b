"""What a method trains with, and its results: Fit, FitResult and LearnResult."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from torch import nn

from hatrack.regime import Regime
from hatrack.tasks.task import Task
from hatrack.text import is_held, score_text

if TYPE_CHECKING:
    from hatrack.methods.method import Method


class EpochResult(NamedTuple):
    """The result of one epoch; a record keeps these as curves.

    Attributes:
        lr: the learning rate.
        loss: the mean training loss.
        valid_loss: the mean loss on validation data; None if there is none.
        valid_accuracy: the accuracy on validation data; None if there is none.
    """

    lr: float
    loss: float
    valid_loss: float | None
    valid_accuracy: float | None


@dataclass
class FitResult:
    """The result of one fit: what `Fit` returns.

    Attributes:
        task: the number of the task.
        epochs: the result of every epoch.
        best: the epoch whose weights were kept, counted from 0.
        engine: how the steps ran: "eager", "compiled" or "recorded".
        halved: how often the fit diverged and started again with half the learning rate.
        watched: after each epoch, the accuracy on the test data of every task that the trainer watches; empty if none.
        steps: how many steps were done; None in the states of older versions.
        examples: how many examples of the training data were in them.
        flops: the floating-point operations of these steps; None if they were not counted.
        peak_bytes: the most memory that the fit took; None if it is not known.
        used: after each epoch, the share of the weights that are frozen if the task ends there, if that is watched as well.
        score: the name of the score that stands in place of the accuracy, "R²" for example; None: it is the accuracy.

    Example:
        >>> method = hr.Method(hr.Network(trunk, tasks=tasks))
        >>> result = hr.Trainer(hr.Regime(epochs=2))(method, tasks[0])
        >>> result
        FitResult(task 0, 2 epochs, best epoch ..., validation accuracy ...%)
        >>> [epoch.lr for epoch in result.epochs]
        [0.05, 0.05]
    """

    task: int
    epochs: list[EpochResult] = field(default_factory=list)
    best: int = 0
    engine: str = "eager"
    halved: int = 0
    watched: list[list[float]] = field(default_factory=list)
    steps: int | None = None
    examples: int | None = None
    flops: int | None = None
    peak_bytes: int | None = None
    used: list[float] = field(default_factory=list)
    score: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain values, as a saved state holds it; what is watched and the costs only if they are
        there."""
        return {name: v for name, v in asdict(self).items() if v is not None and (name not in ("watched", "used") or v)}

    def load(self, saved: Mapping[str, Any], *, ended: bool) -> None:
        """Take over the result of a fit that continues.

        Args:
            saved: what `to_dict` returned.
            ended: the fit had ended; otherwise the engine is the present one.
        """
        self.epochs[:] = [EpochResult(*epoch) for epoch in saved["epochs"]]
        self.best, self.halved = saved["best"], saved["halved"]
        self.watched[:], self.used[:] = saved.get("watched", []), saved.get("used", [])
        self.steps, self.examples = saved.get("steps"), saved.get("examples")
        self.flops, self.peak_bytes = saved.get("flops"), saved.get("peak_bytes")
        if ended:
            self.engine = saved["engine"]

    def __repr__(self) -> str:
        best = self.epochs[self.best] if self.best < len(self.epochs) else None
        said = f"task {self.task}, {_count(len(self.epochs), 'epoch')}" + (f", best epoch {self.best + 1}" if best else "")
        accuracy = None if best is None else best.valid_accuracy
        return f"FitResult({said}{'' if accuracy is None else f', validation {score_text(self.score, accuracy)}'})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class Fit(Protocol):
    """Trains a method on a task: the `fit` that `Method.learn_task` is given. A `Trainer` is one.

    Attributes:
        regime: how every task is trained.

    Example:
        >>> class TwoStages(hr.Method):
        ...     def learn_task(self, task: hr.Task, fit: hr.Fit) -> None:
        ...         first = fit(self, task)
        ...         fit(self, task, epochs=len(first.epochs), lr=fit.regime.lr / 10)
        >>> result = TwoStages(hr.Network(trunk, tasks=tasks)).learn(tasks[0], hr.Trainer(hr.Regime(epochs=2)))
        >>> result.epochs
        4
    """

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
            The result of the fit. The method has its best weights on validation data, or its last if there is none.
        """


@dataclass(frozen=True, repr=False)
class LearnResult:
    """The result of learning a task: what `Method.learn` returns.

    Attributes:
        task: the name of the task.
        fits: the result of every fit, in order; methods that prune or merge have several, `random` none, nor
            `joint` after a number of tasks that is not in its `at`.
        usage: the share of every layer that finished tasks have taken, and what is held whole; empty if the method takes
            nothing.
        again: whether the task had been learned before; what it has learned now replaces that.

    Example:
        >>> result = hr.HAT(hr.Network(trunk, tasks=tasks)).learn(tasks[0], hr.Trainer(hr.Regime(epochs=2)))
        >>> print(result)
        learned 'digits' in 2 epochs, validation accuracy ...% (epoch ...), ...% of the capacity taken
        >>> result.epochs, len(result.fits)
        (2, 1)
    """

    task: str
    fits: list[FitResult]
    usage: dict[str, float]
    again: bool = False

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
    def score(self) -> str | None:
        """The name of the score that `valid_accuracy` is, "R²" for example; None: it is the accuracy."""
        return self.fits[-1].score if self.fits else None

    @property
    def capacity(self) -> float | None:
        """The share of the network that finished tasks have taken, the mean over its layers."""
        taken = [share for layer, share in self.usage.items() if not is_held(layer)]
        return sum(taken) / len(taken) if taken else None

    @property
    def held(self) -> list[str]:
        """The parameters that no later task can change, with the reason, as `usage` names them."""
        return [name for name in self.usage if is_held(name)]

    def __repr__(self) -> str:
        return f"LearnResult({self})"

    def __str__(self) -> str:
        said = (
            f"learned {self.task!r} "
            + "again " * self.again
            + (f"in {_count(self.epochs, 'epoch')}" if self.epochs else "without training")
        )
        said += "" if self.valid_accuracy is None else f", validation {score_text(self.score, self.valid_accuracy)}"
        said += f" (epoch {self.best_epoch})" if self.best_epoch else ""
        said += "" if self.capacity is None else f", {self.capacity:.0%} of the capacity taken"
        return said + (f", {_count(len(self.held), 'parameter')} held whole" if self.held else "")


@runtime_checkable
class TaskObserver(Protocol):
    """A fit that is also told when a task begins and ends. A `Trainer` is one; no fit has to be."""

    def begin_task(self, method: "Method") -> Callable[[], None]:
        """Return a function that rolls back what the fit carries over, for a task that could not be learned."""

    def end_task(self, result: LearnResult) -> None:
        """Take note of the result of a task."""


class CountedFit:
    """A fit that keeps its results.

    Args:
        fit: what trains.
    """

    def __init__(self, fit: Fit) -> None:
        self.fit = fit
        self.results: list[FitResult] = []

    @property
    def regime(self) -> Regime:
        return self.fit.regime

    def __call__(
        self, method: "Method", task: Task, *, plain: dict[nn.Parameter, float] | None = None, **changes: Any
    ) -> FitResult:
        """Train as `fit` does, and keep the result."""
        given: dict[str, Any] = {} if plain is None else {"plain": plain}
        self.results.append(self.fit(method, task, **given, **changes))
        return self.results[-1]

    def begin(self, method: "Method") -> Callable[[], None]:
        """Tell the fit that a task begins, and return what is to be called if it could not be learned."""
        return self.fit.begin_task(method) if isinstance(self.fit, TaskObserver) else lambda: None

    def end(self, task: Task, usage: dict[str, float], again: bool) -> LearnResult:
        """Return the result of the task whose fits these were, and tell the fit of it if it wants to know."""
        result = LearnResult(task.name, self.results, usage, again)
        if isinstance(self.fit, TaskObserver):
            self.fit.end_task(result)
        return result
