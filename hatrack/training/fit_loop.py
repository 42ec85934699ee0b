"""One fit under way: the step, the epochs, and all that the rest of the fit depends on."""

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hatrack.engine.choice import Engine, choose_engine
from hatrack.engine.compiled import Compiled
from hatrack.engine.interleaving import step_done, wait_for_gpu
from hatrack.engine.optimizers import Optimizer, clip
from hatrack.engine.recorded import Recorded
from hatrack.engine.rules import watch_step
from hatrack.methods.divergence import NOT_THE_RATE, Diverged
from hatrack.methods.evaluate import Evaluation
from hatrack.methods.fit import Epoch, Fitted
from hatrack.methods.method import Method
from hatrack.regime import Pace, Regime
from hatrack.seeds import generator, seeded
from hatrack.tasks.batches import count_batches, cut
from hatrack.tasks.split import Split
from hatrack.tasks.task import Task
from hatrack.tasks.transform import draw_crops
from hatrack.training.checkpoint import random_state, set_random_state
from hatrack.training.checkpoint_schema import misfit
from hatrack.training.prefetch import Feed

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


def make_step(method: Method, split: Split, regime: Regime, optimizers: Optimizers) -> Callable[..., Tensor]:
    """The step: what was fetched of a batch's examples and its place in the epoch go in, the loss comes out.

    These tensors are all that varies, so that the step can be recorded; `method.py` states the rule that it obeys.
    """
    steps = torch.full((), count_batches(len(split), regime.batch), device=split.y.device)

    def step(*inputs: Tensor) -> Tensor:
        *parts, number = inputs
        optimizers.zero_grad()
        batch = split.batch(parts, number, steps, regime.batch)
        loss = method.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            method.edit_grads(batch)
            if regime.clip:
                clip(optimizers.weights, regime.clip)
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
        compiled, record = choose_engine(engine, device.type, batches * regime.epochs)
        self.optimizers = Optimizers(regime, list(self.weights.values()), plain)
        crops = (
            torch.zeros(len(task.train), 3, dtype=torch.int64, device=task.train.y.device) if task.train.augment else None
        )
        self.feed = Feed(replace(task.train, crops=crops), regime.batch)
        self.learn_from = make_step(method, self.feed.split, regime, self.optimizers)
        self.step: Step = lambda index, number: self.learn_from(*self.feed.split.fetch(index), number)
        # The losses of the steps of an epoch. One form for tasks of about the same size, so that they are compiled once.
        self.losses = torch.zeros(2 ** max(10, batches.bit_length()), dtype=torch.float32, device=device)
        self.fast = self._compiled() if compiled else None
        self.count: Step = self._count
        if record:
            self.count = Recorded(self._count)
        self.validate = Evaluation(method, task.valid, wrap=Recorded if record else None, wait=wait_for_gpu)
        self.pace = Pace(regime)
        self.fitted = Fitted(task.index, engine="compiled" if compiled else "recorded" if record else "eager")
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
        if score is not None and not math.isfinite(score.loss):
            raise self._diverged(f"validation loss is {score.loss}")
        self.fitted.epochs.append(Epoch(self.pace.lr, loss, *(score or (None, None))))
        better = self.pace.end(loss if score is None else score.loss)
        if better and score is not None and self.regime.restore:
            self.best = {key: value.clone() for key, value in self.method.state_dict().items()}
        if better or not self.best:
            self.fitted.best = number

    def _pass(self, number: int) -> float:
        """The mean loss of the examples while they are learned, read once at the end."""
        device, sizes = self.task.train.y.device, []
        self.method.train()
        with seeded(self.seed, "dropout", number):
            order = torch.randperm(len(self.task.train), generator=generator(self.seed, "batches", number)).to(device)
            if self.feed.split.crops is not None:
                self.feed.split.crops.copy_(draw_crops(len(order), generator(self.seed, "crops", number)))
            places = torch.arange(count_batches(len(order), self.regime.batch), device=device)
            if self.taken_up:
                set_random_state(self.taken_up, device)
            for number, (place, index) in enumerate(zip(places, self.feed(order), strict=True)):
                sizes.append(len(index))
                if number < self.place:
                    continue  # done before the run was stopped
                self.count(index, place)
                self.place = number + 1
                step_done()
                if self.after_step:
                    self.after_step(self)
        wait_for_gpu()
        losses = self._read_losses()
        self.place, self.taken_up = 0, {}
        return math.fsum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)

    def _count(self, index: Tensor, number: Tensor) -> Tensor:
        if self.fast:
            return self.fast(*self.feed.split.fetch(index), number)
        return self._keep(self.step(index, number), number)

    def _keep(self, loss: Tensor, number: Tensor) -> Tensor:
        return self.losses.index_copy_(0, number, loss.float())

    def _read_losses(self) -> list[float]:
        """Of the steps of this epoch so far; an error if one is not finite."""
        losses: list[float] = self.losses[: self.place].tolist()
        for step, loss in enumerate(losses):
            if not math.isfinite(loss):
                raise self._diverged(f"loss is {loss}", step)
        return losses

    def _diverged(self, what: str, step: int | None = None) -> Diverged:
        """The error: where it happened, what is not finite, the likely cause and what to try."""
        epoch, regime = len(self.fitted.epochs), replace(self.regime, lr=self.pace.lr or self.regime.lr)
        where = f"task {self.task.name!r}, epoch {epoch + 1}"
        where += "" if step is None else f", step {step + 1} of {count_batches(len(self.task.train), self.regime.batch)}"
        untouched = epoch == 0 and step == 0
        error = Diverged(f"{where}: the {what}; {NOT_THE_RATE if untouched else self.method.suspect(regime)}")
        error.seen, error.may_be_the_rate = f"{where}: the {what}", not untouched
        return error

    def _compiled(self) -> Compiled:
        """The step from what was fetched on, so that the size of a data set makes no other form."""
        whole = len(cut(torch.arange(len(self.task.train)), self.regime.batch)[0])
        rule = partial(watch_step, self.method, self.optimizers.all)
        return Compiled(lambda *inputs: self._keep(self.learn_from(*inputs), inputs[-1]), whole, rule)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that the rest of the fit depends on: tensors, and plain values. A fit that has diverged has none."""
        self._read_losses()
        kept = {f"method/{key}": value for key, value in self.method.state_dict().items()}
        kept |= {f"best/{key}": value for key, value in self.best.items()}
        for name, parameter in self.weights.items():
            kept |= {f"optimizer/{name}/{key}": v for key, v in self.optimizers.main.state.get(parameter, {}).items()}
        kept |= {"losses": self.losses, **random_state(self.losses.device)}
        pace = {key: value for key, value in vars(self.pace).items() if key != "regime"}
        return kept, {"fitted": asdict(self.fitted), "pace": pace, "place": self.place}

    @torch.no_grad()
    def take_up(self, kept: dict[str, Tensor], words: dict[str, Any]) -> None:
        """Go on from a state."""
        device = self.losses.device
        if wrong := misfit(kept, self.state()[0], self.weights):
            raise ValueError(f"the saved state of a fit to task {self.task.name!r} does not fit: {wrong}")
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
        self.losses.copy_(kept["losses"])
        self.fitted.epochs[:] = [Epoch(*epoch) for epoch in words["fitted"]["epochs"]]
        self.fitted.best, self.fitted.halved = words["fitted"]["best"], words["fitted"]["halved"]
        if words.get("ended"):
            self.fitted.engine = words["fitted"]["engine"]
        vars(self.pace).update(words["pace"])
        self.place = words["place"]
        self.taken_up = kept if self.place else {}

    @property
    def over(self) -> bool:
        return self.pace.over or len(self.fitted.epochs) >= self.regime.epochs

    @torch.no_grad()
    def close(self) -> Fitted:
        """The best state back into the method, which is then ready to predict; no gradients are left behind."""
        for key, value in self.method.state_dict().items():
            if key in self.best:
                value.copy_(self.best[key])
        self.optimizers.zero_grad()
        self.method.eval()
        if self.fast and self.fast.failed:
            self.fitted.engine = "recorded" if isinstance(self.count, Recorded) else "eager"
        self.count = self._count  # what was recorded gives its memory back
        self.validate.forget_recording()
        return self.fitted
