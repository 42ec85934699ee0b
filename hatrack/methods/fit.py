"""What `learn_task` is given to train with, and what comes out: Fit, FitResult, EpochResult."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import nn

from hatrack.regime import Regime
from hatrack.tasks.task import Task

if TYPE_CHECKING:
    from hatrack.methods.method import Method


class Fit(Protocol):
    """Trains a method on a task: the `fit` that `learn` is given. A `Trainer` is one."""

    regime: Regime

    def __call__(
        self, method: "Method", task: Task, *, plain: dict[nn.Parameter, float] | None = None, **changes: Any
    ) -> Any:
        """`changes` are fields of the regime for this fit alone. Parameters in `plain` take SGD steps with a learning rate
        of their own (scaled by the schedule), without decay, outside the norm that is clipped, whatever the optimizer."""


class Epoch(NamedTuple):
    """What an epoch came to; a record keeps these as curves. The validation values are None without validation data."""

    lr: float
    loss: float
    valid_loss: float | None
    valid_accuracy: float | None


@dataclass
class Fitted:
    """What a fit came to."""

    task: int
    epochs: list[Epoch] = field(default_factory=list)
    best: int = 0  # the epoch whose weights were kept
    engine: str = "eager"  # how the steps ran
    halved: int = 0  # how often the fit diverged and began again with half the learning rate
