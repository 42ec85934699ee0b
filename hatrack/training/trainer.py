"""The Trainer: fits a method to a task by a regime, and remembers between fits what is to be kept."""

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hatrack.engine.choice import Engine
from hatrack.engine.recorded import own_stream
from hatrack.engine.rules import watched
from hatrack.methods.divergence import Diverged
from hatrack.methods.fit import Epoch, Fitted
from hatrack.methods.method import Method
from hatrack.regime import Regime
from hatrack.seeds import derive
from hatrack.tasks.task import Task
from hatrack.training.checkpoint import Journal, State
from hatrack.training.fit_loop import Course

__all__ = ["Diverged", "Fitted", "Moment", "Progress", "Trainer"]
HALVINGS = 10  # of the learning rate of one fit, at most


class Moment(NamedTuple):
    """Where training stands after an epoch."""

    task: Task
    tasks: int  # how many the network knows of
    regime: Regime
    fitted: Fitted


Progress = Callable[[Moment], None]


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
        if not isinstance(regime, Regime | None):
            raise ValueError(f"a Trainer takes a Regime, such as Regime(epochs=20), not {regime!r}")
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
            if name in past.kept and past.kept[name].keys() == course.optimizers.main.state[parameter].keys():
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
        """Fit; if that diverges and the regime says so, again from the beginning with half the learning rate."""
        before = {key: value.clone() for key, value in method.state_dict().items()}
        saved = self.journal.next_fit() if self.journal else None
        halved = int(saved[1]["fitted"]["halved"]) if saved else 0
        regime = replace(self.regime.at(task.index), **changes)
        while True:
            changes["lr"] = regime.lr * 0.5**halved
            slower = {parameter: lr * 0.5**halved for parameter, lr in (plain or {}).items()}
            try:
                return self._to_the_end(self.start(method, task, plain=slower, **changes), halved, saved, before)
            except Diverged as error:
                if not error.may_be_the_rate or regime.on_divergence == "stop":
                    raise
                if halved >= HALVINGS:
                    rates = ", ".join(f"{regime.lr * 0.5**times:g}" for times in range(halved + 1))
                    raise Diverged(f"{error}; it ended so with every learning rate: {rates}") from None
                seen = error.seen
            warnings.warn(f"{seen}; it begins again with lr {changes['lr'] / 2:g} (seed {self.seed})", stacklevel=2)
            halved, saved = halved + 1, None

    def _to_the_end(self, course: Course, halved: int, saved: State | None, before: dict[str, Tensor]) -> Fitted:
        """From its first epoch, or where it was saved; a fit that fails leaves the method as it was `before`."""
        method, task = course.method, course.task
        course.fitted.halved = halved
        ended = False
        if saved and self.journal:
            try:
                course.take_up(*saved)
                if method.asked:  # finished tasks answer in every state of a fit as they did before
                    method.asked.check(method)
            except ValueError as error:
                raise ValueError(f"{self.journal.folder}: {error}") from None
            ended = saved[1]["ended"]
        if self.journal:
            course.after_step = self.journal.tick
        try:
            while not course.over and not ended:
                course.epoch()
                if self.progress:
                    self.progress(Moment(task, len(method.net.classes), course.regime, course.fitted))
        except BaseException as error:
            self.past[method].fits[task.index] -= 1  # another try sees the same batches
            self.fits.pop()
            course.best = before
            course.close()
            if isinstance(error, RuntimeError):  # perhaps it can be said in plainer words
                seen = task.train.inputs(torch.zeros(1, dtype=torch.int64, device=task.train.y.device))
                method.net.check_precision(seen, f"task {task.name!r}")
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
        self.fits = [Fitted(**{**fitted, "epochs": [Epoch(*e) for e in fitted["epochs"]]}) for fitted in words["fits"]]
