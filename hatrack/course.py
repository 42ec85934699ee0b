"""One fit under way: the step, the epochs, and all that the rest of the fit depends on."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hatrack.checkpoint import random_state, set_random_state
from hatrack.compiled import Compiled
from hatrack.evaluate import Evaluation
from hatrack.feed import Feed, count_batches
from hatrack.graph import Engine, Recorded, engine_for
from hatrack.method import Method
from hatrack.optimizers import Optimizer
from hatrack.regime import Pace, Regime
from hatrack.seeds import generator, seeded
from hatrack.split import Split, draw_crops
from hatrack.task import Task
from hatrack.turns import step_done, wait_for_gpu


class Diverged(ArithmeticError):  # noqa: N818
    """The loss is no longer a finite number."""


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


Step = Callable[[Tensor, Tensor], Tensor]


class Optimizers:
    """The regime's optimizer on a method's weights, and plain SGD on the parameters that have rates of their own."""

    def __init__(self, regime: Regime, weights: list[nn.Parameter], plain: dict[nn.Parameter, float]) -> None:
        self.weights, self.parameters = weights, [*weights, *plain]
        self.starts = [regime.lr, *plain.values()]
        self.lrs = [torch.full((), lr, device=weights[0].device) for lr in self.starts]
        self.main = Optimizer(regime, weights, self.lrs[0])
        own = Regime()  # plain SGD
        self.all = [self.main, *(Optimizer(own, [p], lr) for p, lr in zip(plain, self.lrs[1:], strict=True))]

    def set_lr(self, lr: float) -> None:
        """The rate of the weights; the others fall with it."""
        for tensor, start in zip(self.lrs, self.starts, strict=True):
            tensor.fill_(start * (lr / self.starts[0]))

    def zero_grad(self) -> None:
        for parameter in self.parameters:  # as the optimizers' own, in a tenth of the time
            parameter.grad = None

    def step(self) -> None:
        for optimizer in self.all:
            optimizer.step()


def make_step(method: Method, split: Split, regime: Regime, optimizers: Optimizers) -> Step:
    """The step: the numbers of a batch's examples and its place in the epoch go in, the loss comes out.

    These two tensors are all that varies, so that the step can be recorded; `method.py` states the rule that it obeys.
    """
    steps = torch.full((), count_batches(len(split), regime.batch), device=split.y.device)

    def step(index: Tensor, number: Tensor) -> Tensor:
        optimizers.zero_grad()
        batch = split.take(index, number, steps, regime.batch)
        loss = method.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            method.edit_grads(batch)
            if regime.clip:
                nn.utils.clip_grad_norm_(optimizers.weights, regime.clip, foreach=True)
            optimizers.step()
            method.constrain()
        return loss.detach()

    return step


class Course:
    """One fit under way. What changes from epoch to epoch: the method, the optimizers, the pace, the best state so far."""

    def __init__(
        self,
        method: Method,
        task: Task,
        regime: Regime,
        plain: dict[nn.Parameter, float],
        seed: int,
        engine: Engine = "eager",
    ) -> None:
        self.method, self.task, self.regime, self.seed = method, task, regime, seed
        self.weights = {name: p for name, p in method.named_parameters() if p.requires_grad and p not in plain}
        if not self.weights:
            raise ValueError(f"task {task.name!r}: the method has no parameter to train")
        device, batches = task.train.y.device, count_batches(len(task.train), regime.batch)
        compiled, record = engine_for(engine, device, batches * regime.epochs)
        self.optimizers = Optimizers(regime, list(self.weights.values()), plain)
        crops = (
            torch.zeros(len(task.train), 3, dtype=torch.int64, device=task.train.y.device) if task.train.augment else None
        )
        self.feed = Feed(replace(task.train, crops=crops), regime.batch)
        self.step = make_step(method, self.feed.split, regime, self.optimizers)
        self.total = torch.zeros((), dtype=torch.float64, device=device)  # of the losses of an epoch
        whole = min(regime.batch, len(task.train))
        self.count: Step = Compiled(self._count, whole, self._changes) if compiled else self._count
        if record:
            self.count = Recorded(self.count)
        self.validate = Evaluation(method, task.valid, record=record)
        self.pace = Pace(regime)
        self.fitted = Fitted(task.index)
        self.best: dict[str, Tensor] = {}
        self.place = 0  # how many steps of the present epoch are done
        self.taken_up: dict[str, Tensor] = {}  # the state of the generators, if the fit goes on within an epoch
        self.after_step: Callable[[Course], None] | None = None

    def epoch(self) -> None:
        """One pass over the training data, then a look at the validation data. It depends on nothing but what is here."""
        number = len(self.fitted.epochs)
        self.optimizers.set_lr(self.pace.start(number))
        loss = self._pass(number)
        score = self.validate() if len(self.task.valid) else None
        for what, value in (("loss", loss), ("validation loss", 0.0 if score is None else score.loss)):
            if not math.isfinite(value):
                where = f"task {self.task.name!r}, epoch {number + 1}"
                raise Diverged(f"{where}: the {what} is {value}; try a smaller lr than {self.pace.lr:g}")
        self.fitted.epochs.append(Epoch(self.pace.lr, loss, *(score or (None, None))))
        better = self.pace.end(loss if score is None else score.loss)
        if better and score is not None and self.regime.restore:
            self.best = {key: value.clone() for key, value in self.method.state_dict().items()}
        if better or not self.best:
            self.fitted.best = number

    def _pass(self, number: int) -> float:
        """The mean loss of the examples while they are learned, read once at the end."""
        device = self.task.train.y.device
        self.method.train()
        with seeded(self.seed, "dropout", number):
            order = torch.randperm(len(self.task.train), generator=generator(self.seed, "batches", number)).to(device)
            if self.feed.split.crops is not None:
                self.feed.split.crops.copy_(draw_crops(len(order), generator(self.seed, "crops", number)))
            places = torch.arange(count_batches(len(order), self.regime.batch), device=device)
            if self.taken_up:
                set_random_state(self.taken_up, device)
            else:
                self.total.zero_()
            for number, (place, index) in enumerate(zip(places, self.feed(order), strict=True)):
                if number < self.place:
                    continue  # done before the run was stopped
                self.count(index, place)
                self.place = number + 1
                step_done()
                if self.after_step:
                    self.after_step(self)
        self.place, self.taken_up = 0, {}
        wait_for_gpu()
        return self.total.item() / len(self.task.train)

    def _count(self, index: Tensor, number: Tensor) -> Tensor:
        return self.total.add_(self.step(index, number), alpha=len(index))

    def _changes(self) -> list[Tensor]:
        """All that a step changes."""
        of_optimizer = [tensor for state in self.optimizers.main.state.values() for tensor in state.values()]
        return [*self.method.state_dict().values(), *of_optimizer, self.total]

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that the rest of the fit depends on: tensors, and plain values."""
        kept = {f"method/{key}": value for key, value in self.method.state_dict().items()}
        kept |= {f"best/{key}": value for key, value in self.best.items()}
        for name, parameter in self.weights.items():
            kept |= {f"optimizer/{name}/{key}": v for key, v in self.optimizers.main.state.get(parameter, {}).items()}
        kept |= {"total": self.total, **random_state(self.total.device)}
        pace = {key: value for key, value in vars(self.pace).items() if key != "regime"}
        return kept, {"fitted": asdict(self.fitted), "pace": pace, "place": self.place}

    @torch.no_grad()
    def take_up(self, kept: dict[str, Tensor], words: dict[str, Any]) -> None:
        """Go on from a state."""
        device = self.total.device
        groups: dict[str, dict[str, Tensor]] = {"method": {}, "best": {}, "optimizer": {}}
        for key, value in kept.items():
            group, _, name = key.partition("/")
            groups.setdefault(group, {})[name] = value
        for key, value in self.method.state_dict().items():
            value.copy_(groups["method"][key])
        self.best = {key: value.to(device) for key, value in groups["best"].items()}
        for key, value in groups["optimizer"].items():
            name, _, what = key.rpartition("/")
            self.optimizers.main.state[self.weights[name]][what] = value.to(device)
        self.total.copy_(kept["total"])
        self.fitted.epochs[:] = [Epoch(*epoch) for epoch in words["fitted"]["epochs"]]
        self.fitted.best = words["fitted"]["best"]
        vars(self.pace).update(words["pace"])
        self.place = words["place"]
        self.taken_up = kept if self.place else {}

    @property
    def over(self) -> bool:
        return self.pace.over or len(self.fitted.epochs) == self.regime.epochs

    @torch.no_grad()
    def close(self) -> Fitted:
        """The best state back into the method, which is then ready to predict; no gradients are left behind."""
        for key, value in self.method.state_dict().items():
            if key in self.best:
                value.copy_(self.best[key])
        self.optimizers.zero_grad()
        self.method.eval()
        return self.fitted
