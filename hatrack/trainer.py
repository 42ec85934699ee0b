"""The one training loop: the step, and the Trainer that fits a method to a task by a regime."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hatrack.checkpoint import Journal, random_state, set_random_state
from hatrack.evaluate import Evaluation
from hatrack.feed import Feed, count_batches
from hatrack.graph import Engine, Recorded, engine_for, faster, own_stream
from hatrack.method import Method
from hatrack.regime import Pace, Regime
from hatrack.rules import watched
from hatrack.seeds import derive, generator, seeded
from hatrack.split import Batch, Split, draw_crops
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


class Moment(NamedTuple):
    """Where training stands after an epoch."""

    task: Task
    tasks: int  # how many the network knows of
    regime: Regime
    fitted: Fitted


Progress = Callable[[Moment], None]
Step = Callable[[Tensor, Tensor], Tensor]


class Optimizers:
    """The regime's optimizer on a method's weights, and plain SGD on the parameters that have rates of their own."""

    def __init__(self, regime: Regime, weights: list[nn.Parameter], plain: dict[nn.Parameter, float]) -> None:
        self.weights, self.parameters = weights, [*weights, *plain]
        self.starts = [regime.lr, *plain.values()]
        self.lrs = [torch.full((), lr, device=weights[0].device) for lr in self.starts]
        self.main = regime.make_optimizer(weights, self.lrs[0])
        self.all = [self.main, *(torch.optim.SGD([p], lr=r, fused=True) for p, r in zip(plain, self.lrs[1:], strict=True))]

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


def make_step(method: Method, split: Split, regime: Regime, optimizers: Optimizers, *, compiled: bool = False) -> Step:
    """The step: the numbers of a batch's examples and its place in the epoch go in, the loss comes out.

    These two tensors are all that varies, so that the step can be recorded; `method.py` states the rule that it obeys.
    """
    steps = torch.full((), count_batches(len(split), regime.batch), device=split.y.device)

    def forward(index: Tensor, number: Tensor) -> tuple[Tensor, Batch]:
        batch = split.take(index, number, steps, regime.batch)
        return method.loss(batch), batch

    edit_grads, constrain = method.edit_grads, method.constrain
    if compiled:  # the optimizer stays as it is: its step is one operation already
        forward, edit_grads, constrain = faster(forward), faster(edit_grads), faster(constrain)

    def step(index: Tensor, number: Tensor) -> Tensor:
        optimizers.zero_grad()
        loss, batch = forward(index, number)
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            edit_grads(batch)
            if regime.clip:
                nn.utils.clip_grad_norm_(optimizers.weights, regime.clip, foreach=True)
            optimizers.step()
            constrain()
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
        self.step = make_step(method, self.feed.split, regime, self.optimizers, compiled=compiled)
        self.total = torch.zeros((), dtype=torch.float64, device=device)  # of the losses of an epoch
        self.count: Step = Recorded(self._count) if record else self._count
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


@dataclass
class Past:
    """What a trainer remembers of a method between its fits."""

    fits: Counter[int] = field(default_factory=Counter)  # how many, by task
    kept: dict[str, dict[str, Any]] = field(default_factory=dict)  # the optimizer's state by parameter name, if it is kept


class Trainer:
    """Fits methods to tasks by one regime: `fit = Trainer(Regime(epochs=20)); method.learn(task, fit)`.

    Two methods at one seed see the same batches: their order depends on the seed, the task, the fit and the epoch alone.
    """

    def __init__(
        self,
        regime: Regime | None = None,
        *,
        seed: int = 0,
        progress: Progress | None = None,
        watch: bool = False,
        engine: Engine = "auto",
    ) -> None:
        self.regime = regime or Regime()
        self.seed = seed
        self.engine = engine  # how steps run: see graph.py
        self.progress = progress
        self.watch = watch  # check that every step obeys the rule of the step (slow; for tests of methods)
        self.journal: Journal | None = None  # where the state of fits is saved
        self.fits: list[Fitted] = []
        self.past: WeakKeyDictionary[Method, Past] = WeakKeyDictionary()

    def start(self, method: Method, task: Task, *, plain: dict[nn.Parameter, float] | None = None, **changes: Any) -> Course:
        """A fit, ready for its first epoch."""
        method.net.expect(task.index, task.name, task.classes, task.shape)
        regime = replace(self.regime.at(task.index), **changes)
        if isinstance(task.train.task, int):
            method.net.remember(task.index, task.train.view, task.train.x[0].numel())
        past = self.past.setdefault(method, Past())
        number = past.fits[task.index]
        past.fits[task.index] += 1
        engine: Engine = "eager" if self.watch else self.engine
        course = Course(method, task, regime, plain or {}, derive(self.seed, "task", task.index, "fit", number), engine)
        for name, parameter in course.weights.items() if regime.keep_state else ():
            if name in past.kept:
                course.optimizers.main.state[parameter] = {k: v.clone() for k, v in past.kept[name].items()}
        if self.watch:
            course.step = watched(course.step, method, course.optimizers.all)
        self.fits.append(course.fitted)
        return course

    def __call__(
        self, method: Method, task: Task, *, plain: dict[nn.Parameter, float] | None = None, **changes: Any
    ) -> Fitted:
        """See `method.Fit`. The method ends up with its best weights on validation data, or the last if there is none."""
        with own_stream(task.train.y.device):
            return self._fit(method, task, plain, changes)

    def _fit(self, method: Method, task: Task, plain: dict[nn.Parameter, float] | None, changes: dict[str, Any]) -> Fitted:
        before = {key: value.clone() for key, value in method.state_dict().items()}
        course = self.start(method, task, plain=plain, **changes)
        saved = self.journal.next_fit() if self.journal else None
        ended = False
        if saved:
            course.take_up(*saved)
            ended = saved[1]["ended"]
        if self.journal:
            course.after_step = self.journal.tick
        try:
            while not course.over and not ended:
                course.epoch()
                if self.progress:
                    self.progress(Moment(task, len(method.net.classes), course.regime, course.fitted))
        except BaseException:
            self.past[method].fits[task.index] -= 1  # another try sees the same batches
            course.best = before  # a fit that fails leaves the method as it was
            course.close()
            raise
        if course.regime.keep_state:
            state = course.optimizers.main.state
            self.past[method].kept.update({name: dict(state[p]) for name, p in course.weights.items()})
        if not ended:
            course.close()
            if self.journal:
                self.journal.keep(course, ended=True)
        method.eval()
        return course.fitted

    def remembered(self, method: Method, kept: dict[str, Tensor]) -> dict[str, Any]:
        """What is remembered between fits: tensors go into `kept`, the rest comes back."""
        past = self.past.setdefault(method, Past())
        for name, state in past.kept.items():
            kept.update({f"past/{name}/{key}": value for key, value in state.items()})
        return {"counts": dict(past.fits), "fits": [asdict(fitted) for fitted in self.fits]}

    def recall(self, method: Method, kept: dict[str, Tensor], words: dict[str, Any]) -> None:
        """The same, back again."""
        past = Past(Counter({int(task): count for task, count in words["counts"].items()}))
        for key, value in kept.items():
            if key.startswith("past/"):
                name, _, what = key.removeprefix("past/").rpartition("/")
                past.kept.setdefault(name, {})[what] = value.to(method.net.example.device)
        self.past[method] = past
        self.fits = [Fitted(f["task"], [Epoch(*e) for e in f["epochs"]], f["best"]) for f in words["fits"]]
