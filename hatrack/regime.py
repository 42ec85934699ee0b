"""How every task is trained: a Regime, and the schedule of its learning rate."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self

from hatrack.options import Option, check, parameters

BELONGS = {  # options that mean something with these choices only
    "momentum": ("optimizer", ("momentum",)),
    "patience": ("schedule", ("plateau",)),
    "factor": ("schedule", ("plateau",)),
    "floor": ("schedule", ("plateau",)),
    "gamma": ("schedule", ("step", "exponential")),
    "every": ("schedule", ("step",)),
}


@dataclass(frozen=True)
class Regime:
    """How every task is trained. The defaults are the HAT paper's: plain SGD, a rate that falls on plateaus."""

    epochs: Annotated[int, Option("passes over the training set, at most", low=1)] = 200
    batch: Annotated[int, Option("examples per step", low=1)] = 64
    optimizer: Annotated[Literal["sgd", "momentum", "adam", "adamw"], Option("how the weights move")] = "sgd"
    lr: Annotated[float, Option("learning rate", above=0)] = 0.05
    momentum: Annotated[float, Option("of the optimizer 'momentum'", low=0, high=0.9999)] = 0.9
    weight_decay: Annotated[float, Option("pull of the weights towards zero (decoupled in adamw)", low=0)] = 0.0
    keep_state: Annotated[bool, Option("keep the optimizer's state from task to task")] = False
    schedule: Annotated[
        Literal["plateau", "constant", "step", "exponential", "cosine"],
        Option("plateau: lr / FACTOR after PATIENCE epochs without a better validation loss, stop under FLOOR; "
               "step: lr * GAMMA every EVERY epochs; exponential: lr * GAMMA each epoch; cosine: down to 0"),
    ] = "plateau"  # fmt: skip
    patience: Annotated[int, Option("epochs without a better validation loss before lr falls", low=1)] = 5
    factor: Annotated[float, Option("what lr is divided by on a plateau", above=1)] = 3.0
    floor: Annotated[float, Option("training stops when lr falls below this on a plateau", low=0)] = 1e-4
    gamma: Annotated[float, Option("what lr is multiplied with (step, exponential)", above=0, high=1)] = 0.1
    every: Annotated[int, Option("epochs between two steps of the schedule 'step'", low=1)] = 10
    restore: Annotated[bool, Option("end a task with the weights of its best epoch on validation data")] = True
    clip: Annotated[float, Option("largest norm of the gradient; 0: not clipped", low=0)] = 1e4
    task_lr_decay: Annotated[float, Option("lr is multiplied with this from task to task", above=0, high=1)] = 1.0
    task_lr_floor: Annotated[float, Option("the decay from task to task stops here", low=0)] = 5e-5
    task_batch_decay: Annotated[float, Option("batch is multiplied with this from task to task", above=0, high=1)] = 1.0
    on_divergence: Annotated[
        Literal["stop", "halve"],
        Option("when the loss is not finite: stop, or begin the fit again with half the learning rate"),
    ] = "stop"

    def __post_init__(self) -> None:
        check(Regime, vars(self))
        for name, parameter in parameters(Regime).items():  # 1 and 1.0 are one regime
            if parameter.type is float:
                object.__setattr__(self, name, float(getattr(self, name)))

    def check_effect(self, given: Iterable[str], method: str, replaces: Mapping[str, str]) -> None:
        """An error if one of these options, for which somebody chose a value, does nothing: see `Method.instead`."""
        for name in given:
            if name in replaces:
                flag, other = (word.replace("_", "-") for word in (name, replaces[name]))
                raise ValueError(f"--{flag} does nothing with {method}, which has --{other} instead")
            of, choices = BELONGS.get(name, ("", ()))
            if of and (chosen := getattr(self, of)) not in choices:
                raise ValueError(f"--{name} does nothing with --{of} {chosen}; it is for --{of} {' or '.join(choices)}")

    def at(self, task: int) -> Self:
        """The regime of task number `task`, after the decays from task to task."""
        lr = self.lr * self.task_lr_decay**task
        return replace(
            self,
            lr=max(lr, min(self.lr, self.task_lr_floor)) if self.task_lr_decay < 1 else self.lr,
            batch=max(1, round(self.batch * self.task_batch_decay**task)),
        )

    def lr_at(self, epoch: int) -> float:
        """The schedules that the epoch alone decides."""
        match self.schedule:
            case "step":
                return self.lr * self.gamma ** (epoch // self.every)
            case "exponential":
                return self.lr * self.gamma**epoch
            case "cosine":
                return self.lr * 0.5 * (1 + math.cos(math.pi * epoch / self.epochs))
            case _:
                return self.lr

    @property
    def steepest(self) -> float:
        """The curvature of a loss from which on steps overshoot further and further; Adam's are as long at any."""
        if self.optimizer in ("adam", "adamw"):
            return math.inf
        return 2 * (1 + (self.momentum if self.optimizer == "momentum" else 0)) / self.lr


class LRSchedule:
    """The learning rate from epoch to epoch, and when to stop."""

    def __init__(self, regime: Regime) -> None:
        self.regime, self.lr, self.patience = regime, regime.lr, regime.patience
        self.lowest = math.inf
        self.finished = False

    def start(self, epoch: int) -> float:
        """Begin an epoch and return its learning rate."""
        if self.regime.schedule != "plateau":
            self.lr = self.regime.lr_at(epoch)
        return self.lr

    def end(self, loss: float) -> bool:
        """End an epoch with this loss and return whether it is the lowest so far."""
        better = loss < self.lowest
        self.lowest = min(self.lowest, loss)
        self.patience = self.regime.patience if better else self.patience - 1
        if self.regime.schedule == "plateau" and not self.patience:
            self.lr, self.patience = self.lr / self.regime.factor, self.regime.patience
            self.finished = self.lr < self.regime.floor
        return better

    def state(self) -> dict[str, Any]:
        """Everything that later epochs depend on, under the names that saved states have."""
        return {"lr": self.lr, "patience": self.patience, "lowest": self.lowest, "over": self.finished}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.lr, self.patience, self.lowest = state["lr"], state["patience"], state["lowest"]
        self.finished = state["over"]
