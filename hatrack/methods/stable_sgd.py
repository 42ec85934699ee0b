"""Stable SGD (Mirzadeh, Farajtabar, Pascanu, Ghasemzadeh, NeurIPS 2020), https://arxiv.org/abs/2006.06958

Plain SGD in a regime that leads to wide minima and to smaller changes from task to task. The method has four ingredients,
each with a plastic counterpart. Its learning rate and batch size replace those of the regime; all else is the regime's.
"""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal

from torch import nn

from hatrack.methods.fit import Fit
from hatrack.methods.method import Method
from hatrack.networks.network import Network
from hatrack.options import Option, check, nearest
from hatrack.tasks.task import Task

INGREDIENTS = ("lr", "decay", "batch", "dropout")
PLASTIC_LR, PLASTIC_BATCH = 0.01, 64  # of the authors' plastic regime, which has neither decay nor dropout


class StableSGD(Method):
    """SGD in the stable regime: a large first learning rate that falls from task to task, small batches, dropout.

    Nothing is stored between tasks. Wide minima make the loss of an earlier task less sensitive to later updates.

    Args:
        net: the network; the method trains it in place. The options are listed by `hatrack list stable-sgd`.

    Example:
        >>> method = hr.StableSGD(hr.Network(trunk, tasks=tasks), first_lr=0.1)
        >>> for task in tasks:
        ...     method.learn(task, hr.Trainer(hr.Regime(epochs=20)))

    See docs/methods/stable-sgd.md for formulas, published values and results.
    """

    replaces: ClassVar[Mapping[str, str]] = {
        "lr": "first_lr",
        "task_lr_decay": "lr_decay",
        "task_lr_floor": "lowest_lr",
        "batch": "small_batch",
        "task_batch_decay": "batch_decay",
    }

    def __init__(
        self,
        net: Network,
        *,
        stable: Annotated[
            tuple[str, ...],
            Option("the ingredients that are stable, by commas; the others are plastic, and with the word none all are"),
        ] = INGREDIENTS,
        first_lr: Annotated[float, Option("lr: learning rate of the first task; plastic: 0.01", above=0)] = 0.1,
        lr_decay: Annotated[
            float, Option("decay: what it is multiplied with from task to task; plastic: 1", above=0, high=1)
        ] = 0.8,
        lowest_lr: Annotated[float, Option("decay: where it stops to fall", low=0)] = 5e-5,
        decay_from: Annotated[
            Literal["second", "first"], Option("decay: the first task with a lower rate; in the authors' code the first")
        ] = "second",
        small_batch: Annotated[int, Option("batch: examples per step in the first task; plastic: 64", low=1)] = 10,
        batch_decay: Annotated[
            float, Option("batch: what they are multiplied with from task to task", above=0, high=1)
        ] = 1.0,
        drop: Annotated[
            float, Option("dropout: share dropped at every dropout layer; plastic: 0; -1: as it is", low=-1, high=0.99)
        ] = 0.25,
    ) -> None:
        super().__init__(net)
        self.options = check(StableSGD, locals())
        self.stable = parse_ingredients(stable)
        self.first_lr, self.lr_decay, self.lowest_lr, self.decay_from = first_lr, lr_decay, lowest_lr, decay_from
        self.small_batch, self.batch_decay = small_batch, batch_decay
        share = drop if "dropout" in self.stable else 0.0
        if share >= 0:
            set_dropout(net.trunk, share)

    def regime(self, task: int) -> dict[str, Any]:
        """Return the fields of the regime that change for task number `task`, from 0."""
        lr = self.first_lr if "lr" in self.stable else PLASTIC_LR
        batch = PLASTIC_BATCH
        if "decay" in self.stable:
            falls = task + (self.decay_from == "first")
            lr = max(lr * self.lr_decay**falls, min(lr, self.lowest_lr))
        if "batch" in self.stable:
            batch = max(1, round(self.small_batch * self.batch_decay**task))
        return {"lr": lr, "batch": batch}

    def learn_task(self, task: Task, fit: Fit) -> None:
        fit(self, task, **self.regime(task.index))


def parse_ingredients(names: Collection[str]) -> frozenset[str]:
    """Return the ingredients of these names; the single word none stands for no ingredient."""
    names = [] if tuple(names) == ("none",) else names
    for name in names:
        if name not in INGREDIENTS:
            raise ValueError(f"stable has no ingredient {name!r}; {nearest(name, INGREDIENTS)}; or, by itself, none")
    return frozenset(names)


def set_dropout(trunk: nn.Module, share: float) -> None:
    """Set the probability of every dropout layer."""
    for module in trunk.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = share
