"""The Trainer: fits a method to a task by a regime, and carries over from fit to fit what is to be kept."""

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
from hatrack.methods.divergence import Diverged
from hatrack.methods.fit import EpochResult, FitResult
from hatrack.methods.method import Method
from hatrack.regime import Regime
from hatrack.seeds import derive
from hatrack.tasks.task import Task
from hatrack.training.checkpoint import Checkpointer, State
from hatrack.training.fit_loop import FitLoop

HALVINGS = 10  # of the learning rate of one fit, at most


class ProgressEvent(NamedTuple):
    """What a progress callback is given after every epoch."""

    task: Task
    tasks: int  # how many tasks the network knows
    regime: Regime
    result: FitResult  # of the fit so far


Progress = Callable[[ProgressEvent], None]


@dataclass
class CarriedState:
    """What a trainer carries over from one fit of a method to the next."""

    fits: Counter[int] = field(default_factory=Counter)  # how many fits there were, by task
    optimizer: dict[str, dict[str, Any]] = field(default_factory=dict)  # its state by parameter name, if it is kept


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
        self.engine = engine  # how steps run: see engine/choice.py
        self.progress = progress
        self.watch = watch  # check that every step obeys the rule of the step (slow; for tests of methods)
        self.checkpointer: Checkpointer | None = None  # saves the state of fits
        self.fits: list[FitResult] = []
        self.carried: WeakKeyDictionary[Method, CarriedState] = WeakKeyDictionary()

    def start(
        self, method: Method, task: Task, *, plain: dict[nn.Parameter, float] | None = None, **changes: Any
    ) -> FitLoop:
        """A fit, ready for its first epoch."""
        method.net.check_task(task)
        regime = replace(self.regime.at(task.index), **changes)
        carried = self.carried.setdefault(method, CarriedState())
        number = carried.fits[task.index]
        carried.fits[task.index] += 1
        seed = derive(self.seed, "task", task.index, "fit", number)
        loop = FitLoop(method, task, regime, plain or {}, seed, self.engine, watch=self.watch)
        for name, parameter in loop.weights.items() if regime.keep_state else ():
            before = carried.optimizer.get(name)
            if before and before.keys() == loop.optimizers.main.state[parameter].keys():
                loop.optimizers.main.state[parameter] = {key: value.clone() for key, value in before.items()}
        self.fits.append(loop.result)
        return loop

    def __call__(
        self, method: Method, task: Task, *, plain: dict[nn.Parameter, float] | None = None, **changes: Any
    ) -> FitResult:
        """See `methods/fit.py`. The method ends with its best weights on validation data, or the last if there is none."""
        with own_stream(task.train.y.device):
            return self._fit(method, task, plain, changes)

    def _fit(
        self, method: Method, task: Task, plain: dict[nn.Parameter, float] | None, changes: dict[str, Any]
    ) -> FitResult:
        """Fit; if that diverges and the regime says so, again from the beginning with half the learning rate."""
        regime = replace(self.regime.at(task.index), **changes)
        before = None
        if regime.on_divergence == "halve":
            before = {key: value.clone() for key, value in method.state_dict().items()}
        saved = self.checkpointer.next_fit() if self.checkpointer else None
        halved = int(saved[1]["fitted"]["halved"]) if saved else 0
        while True:
            changes["lr"] = regime.lr * 0.5**halved
            slower = {parameter: lr * 0.5**halved for parameter, lr in (plain or {}).items()}
            loop = self.start(method, task, plain=slower, **changes)
            loop.result.halved = halved
            try:
                return self._run(loop, saved)
            except Diverged as error:
                if before is None or not error.may_be_the_rate:
                    raise
                if halved >= HALVINGS:
                    rates = ", ".join(f"{regime.lr * 0.5**times:g}" for times in range(halved + 1))
                    raise Diverged(f"{error}; it ended so with every learning rate: {rates}") from None
                seen = error.seen
            warnings.warn(f"{seen}; it begins again with lr {changes['lr'] / 2:g} (seed {self.seed})", stacklevel=2)
            loop.best = before
            loop.close()
            halved, saved = halved + 1, None

    def _run(self, loop: FitLoop, saved: State | None) -> FitResult:
        """Carry out a fit from its first epoch, or from where it was saved, to its end."""
        method, task = loop.method, loop.task
        ended = self._resume(loop, saved) if saved else False
        if self.checkpointer:
            loop.after_step = self.checkpointer.after_step
        try:
            while not loop.finished and not ended:
                loop.epoch()
                if self.progress:
                    self.progress(ProgressEvent(task, len(method.net.classes), loop.regime, loop.result))
        except BaseException as error:
            self.carried[method].fits[task.index] -= 1  # another try sees the same batches
            self.fits.pop()
            loop.best = {}
            loop.close()
            if isinstance(error, RuntimeError):  # perhaps it can be said in plainer words
                seen = task.train.inputs(torch.zeros(1, dtype=torch.int64, device=task.train.y.device))
                method.net.check_precision(seen, f"task {task.name!r}")
            raise
        if loop.regime.keep_state:
            state = loop.optimizers.main.state
            self.carried[method].optimizer.update({name: dict(state[p]) for name, p in loop.weights.items()})
        if not ended:
            loop.close()
            if self.checkpointer:
                self.checkpointer.save_fit(loop, ended=True)
        method.eval()
        return loop.result

    def _resume(self, loop: FitLoop, saved: State) -> bool:
        """Continue from a saved state; return whether the fit had ended."""
        assert self.checkpointer is not None
        try:
            loop.load_state(*saved)
            if loop.method.probes:  # in every state of a fit finished tasks answer as they did before
                loop.method.probes.check(loop.method)
        except ValueError as error:
            raise ValueError(f"{self.checkpointer.folder}: {error}") from None
        return bool(saved[1]["ended"])

    def state(self, method: Method) -> State:
        """What is carried over between fits: tensors, and metadata."""
        carried = self.carried.setdefault(method, CarriedState())
        tensors = {f"past/{name}/{key}": v for name, state in carried.optimizer.items() for key, v in state.items()}
        return tensors, {"counts": dict(carried.fits), "fits": [asdict(result) for result in self.fits]}

    def load_state(self, method: Method, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
        """Continue with what was carried over when a state was saved."""
        carried = CarriedState(Counter({int(task): count for task, count in metadata["counts"].items()}))
        for key, value in tensors.items():
            if key.startswith("past/"):
                name, _, what = key.removeprefix("past/").rpartition("/")
                carried.optimizer.setdefault(name, {})[what] = value.to(method.net.example.device)
        self.carried[method] = carried
        self.fits = [FitResult(**{**fit, "epochs": [EpochResult(*e) for e in fit["epochs"]]}) for fit in metadata["fits"]]
