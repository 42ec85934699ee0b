"""The training regime of every task, and the schedule of its learning rate."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
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


@dataclass(frozen=True, repr=False)
class Regime:
    """How every task is trained. The defaults are the HAT paper's: plain SGD, a learning rate that falls on plateaus.

    Args:
        epochs: passes over the training set, at most.
        batch: examples per step.
        optimizer: "sgd", "momentum", "adam" or "adamw".
        lr: the learning rate.
        momentum: of the optimizer "momentum".
        weight_decay: how strongly weights are pulled towards zero; decoupled in "adamw".
        keep_state: keep the optimizer's state from task to task.
        schedule: "plateau" divides lr by `factor` after `patience` epochs without a better validation loss and stops under
            `floor`; "step" multiplies it with `gamma` every `every` epochs, "exponential" every epoch; "cosine" lets it
            fall to 0; "constant" keeps it.
        patience: epochs without a better validation loss before lr falls.
        factor: what lr is divided by on a plateau.
        floor: training stops when lr falls below this on a plateau.
        gamma: what lr is multiplied with (step, exponential).
        every: epochs between two steps of the schedule "step".
        restore: end a task with the weights of its best epoch on validation data.
        clip: the largest norm of the gradient; 0 does not clip.
        task_lr_decay: what lr is multiplied with from task to task.
        task_lr_floor: the decay of lr from task to task stops here.
        task_batch_decay: what the batch size is multiplied with from task to task.
        on_divergence: what happens when the loss is not finite: "stop", or "halve" to start the fit again with half the
            learning rate.
        steps: training steps of every fit, in place of `epochs`; 0 trains for `epochs`. The last epoch may be a part of one.
        warmup: steps at the start of every fit in which lr grows from near 0 to its value.
        accumulate: the gradients of a batch are computed in so many parts, one after the other, which takes less memory. A
            batch norm sees the parts, which need at least two examples each.
        smoothing: label smoothing, the share of a label that is spread over all classes in training.
        best_by: what on validation data decides which epoch is the best: the lowest "loss" or the highest "accuracy", which
            is the score of a task with another target.
        stop_after: a fit ends after so many epochs without a better one on validation data; 0: never. It and `best_by` do
            nothing for a task without validation data, of which a warning tells.
        augment: what is done to the images of every training step: "crop-flip" moves them by up to 4 pixels and mirrors half
            of them. A function of your own is an argument of the `Trainer`.

    Raises:
        ValueError: if a value is not allowed.

    Example:
        >>> hr.Regime(epochs=20, optimizer="adam", lr=1e-3)
        Regime(epochs=20, optimizer='adam', lr=0.001)
    """

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
        Option("when the loss is not finite: stop, or begin the fit again with half the learning rate", added=True),
    ] = "stop"
    steps: Annotated[
        int, Option("steps of a fit in place of EPOCHS, unless its method sets its epochs; 0: EPOCHS", low=0, added=True)
    ] = 0
    warmup: Annotated[int, Option("steps in which lr grows to its value at the start of every fit", low=0, added=True)] = 0
    accumulate: Annotated[
        int, Option("compute the gradients of a batch in so many parts, which takes less memory", low=1, added=True)
    ] = 1
    smoothing: Annotated[
        float,
        Option("label smoothing: the share of a label that is spread over all classes", low=0, high=0.9999, added=True),
    ] = 0.0
    best_by: Annotated[
        Literal["loss", "accuracy"], Option("what on validation data decides which epoch is the best", added=True)
    ] = "loss"
    stop_after: Annotated[
        int, Option("end a fit after so many epochs without a better one on validation data; 0: never", low=0, added=True)
    ] = 0
    augment: Annotated[
        Literal["none", "crop-flip"],
        Option("crop-flip: move the images of every training step at random, and mirror half of them", added=True),
    ] = "none"

    def __post_init__(self) -> None:
        check(Regime, vars(self))
        for name, parameter in parameters(Regime).items():  # 1 and 1.0 are one regime
            if parameter.type is float:
                object.__setattr__(self, name, float(getattr(self, name)))

    def __repr__(self) -> str:
        changed = [f"{f.name}={value!r}" for f in fields(self) if (value := getattr(self, f.name)) != f.default]
        return f"Regime({', '.join(changed)})"

    def check_effect(self, given: Iterable[str], method: str, replaces: Mapping[str, str]) -> None:
        """Raise an error if one of these options, for which a user chose a value, has no effect.

        Args:
            given: the names of the options.
            method: the name of the method.
            replaces: the options that have no effect with this method, see `Method.replaces`.
        """
        for name in given:
            if name in replaces:
                flag, other = (word.replace("_", "-") for word in (name, replaces[name]))
                raise ValueError(f"--{flag} does nothing with {method}, which has --{other} instead")
            if name == "epochs" and self.steps:
                raise ValueError(f"--epochs does nothing with --steps {self.steps}, which says how long a task is trained")
            of, choices = BELONGS.get(name, ("", ()))
            if of and (chosen := getattr(self, of)) not in choices:
                raise ValueError(f"--{name} does nothing with --{of} {chosen}; it is for --{of} {' or '.join(choices)}")

    def at(self, task: int) -> Self:
        """Return the regime of task number `task`, after the decays from task to task."""
        lr = self.lr * self.task_lr_decay**task
        return replace(
            self,
            lr=max(lr, min(self.lr, self.task_lr_floor)) if self.task_lr_decay < 1 else self.lr,
            batch=max(1, round(self.batch * self.task_batch_decay**task)),
        )

    def in_epochs(self, batches: int) -> Self:
        """Return the regime with as many epochs, of so many batches each, as its `steps` take; without steps, itself."""
        return replace(self, epochs=-(-self.steps // batches)) if self.steps else self

    def lr_at(self, epoch: int) -> float:
        """Return the learning rate of an epoch, for schedules that depend on nothing else."""
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
        """The largest curvature of a loss at which gradient steps still converge; it has no bound for Adam, whose steps do
        not grow with the gradient."""
        if self.optimizer in ("adam", "adamw"):
            return math.inf
        return 2 * (1 + (self.momentum if self.optimizer == "momentum" else 0)) / self.lr


class LRSchedule:
    """Decides the learning rate of every epoch, and when to stop.

    Args:
        regime: the regime, whose fields `lr`, `schedule` and those that belong to it are used.
    """

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
        """Return everything that later epochs depend on, under the names that saved states have."""
        return {"lr": self.lr, "patience": self.patience, "lowest": self.lowest, "over": self.finished}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.lr, self.patience, self.lowest = state["lr"], state["patience"], state["lowest"]
        self.finished = state["over"]
