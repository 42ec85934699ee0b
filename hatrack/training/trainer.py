"""The Trainer: fits a method to a task by a regime, and carries state over from fit to fit."""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hatrack.engine.choice import ENGINES, PRECISIONS, Engine, Precision, choose_engine
from hatrack.engine.interleaving import wait_for_gpu
from hatrack.engine.precision import precision_scope
from hatrack.engine.recorded import own_stream
from hatrack.methods.divergence import Diverged
from hatrack.methods.evaluate import Evaluation
from hatrack.methods.fit import EpochResult, FitResult, LearnResult
from hatrack.methods.method import Method
from hatrack.methods.modes import without_autocast_cache
from hatrack.methods.parts.snapshot import copy_trained
from hatrack.networks.trunk import check_precision
from hatrack.options import choose
from hatrack.regime import Regime
from hatrack.seeds import derive
from hatrack.tasks.device import to_device
from hatrack.tasks.targets import check_smoothing
from hatrack.tasks.task import Task, with_crops
from hatrack.text import printable
from hatrack.tracking.log import EpochLog
from hatrack.tracking.trackers import Log, make_trackers
from hatrack.training.augmentation import Augment, check_augment
from hatrack.training.checkpoint import Checkpointer, State
from hatrack.training.epoch_sizes import max_steps
from hatrack.training.fit_loop import FitLoop
from hatrack.training.progress import Progress, ProgressEvent, find_console, show_progress
from hatrack.training.ranks import Ranks
from hatrack.training.stopwatch import Stopwatch

LIKELY = 60_000  # examples of all tasks together, as long as these are not known
HALVINGS = 10  # of the learning rate of one fit, at most


@dataclass
class CarriedState:
    """The state that a trainer carries over from one fit of a method to the next."""

    fits: Counter[int] = field(default_factory=Counter)  # how many fits there were, by task
    optimizer: dict[str, dict[str, Any]] = field(default_factory=dict)  # its state by parameter name, if it is kept


class Trainer:
    """Fits methods to tasks by one regime. It is what `Method.learn` takes as `fit`.

    Two methods at one seed see the same batches: their order depends on the seed, the task, the fit and the epoch alone.

    Args:
        regime: how every task is trained; by default `Regime()`, the HAT paper's.
        seed: decides the order of batches, dropout and random crops.
        progress: None shows a bar in a terminal or a notebook and one line per learned task, and nothing elsewhere (in
            tests and logs); False shows nothing; a callable gets a `ProgressEvent` after every epoch.
        watch: check that every step obeys the rule of the step (slow; for tests of methods).
        engine: how steps run: "eager", "compiled", "recorded" or "auto", which chooses one.
        watch_tasks: tasks whose accuracy on test data is measured after every epoch, see `FitResult.watched`; it changes
            nothing of what is learned, and costs an evaluation per task and epoch.
        precision: how matrix products and convolutions of fits are computed: "float32", "tf32" (on a GPU) or "bfloat16" (on
            a GPU, or a CPU that can); weights and sums stay float32. None leaves it to torch's settings and to autocast.
        augment: what is done to the images of every training step: a function gets and returns a batch of images as the
            network sees them; "crop-flip" is that of the regime. None: what the regime says.
        log: where the results of every epoch go: "tensorboard" (files in the folder `tensorboard`), "wandb", a
            `TensorBoard(folder)` or `WandB(project)`, a function that is called with a dict for every epoch and task, or a
            list of these; for the tasks of one method. It changes nothing of what is learned.

    Attributes:
        fits: the result of every fit so far, a `FitResult` each.

    Example:
        >>> fit = hr.Trainer(hr.Regime(epochs=2), seed=1)
        >>> result = hr.HAT(hr.Network(trunk, tasks=tasks)).learn(tasks[0], fit)
        >>> result.epochs
        2
        >>> fit
        Trainer(Regime(epochs=2), seed=1; 1 fit done)
    """

    def __init__(
        self,
        regime: Regime | None = None,
        *,
        seed: int = 0,
        progress: Progress | bool | None = None,
        watch: bool = False,
        engine: Engine = "auto",
        watch_tasks: Sequence[Task] = (),
        precision: Precision | None = None,
        augment: Augment = None,
        log: Log | Sequence[Log] | None = None,
    ) -> None:
        if not isinstance(regime, Regime | None):
            raise ValueError(f"a Trainer takes a Regime, such as Regime(epochs=20), not {regime!r}")
        if not (progress is None or isinstance(progress, bool) or callable(progress)):
            raise ValueError(f"progress must be a callable, False for none or None for the default, not {progress!r}")
        if type(seed) is not int or seed < 0:
            raise ValueError(f"seed must be a whole number from 0, not {seed!r}")
        self.regime, self.seed, self.engine = regime or Regime(), seed, choose("engine", engine, ENGINES)
        if not isinstance(watch_tasks, Sequence) or not all(isinstance(task, Task) for task in watch_tasks):
            raise ValueError("watch_tasks takes a list of tasks, such as those of a benchmark")
        self.progress, self.watch, self.watch_tasks = progress, watch, watch_tasks
        self.precision = None if precision is None else choose("precision", precision, PRECISIONS)
        self.augment = check_augment(augment, self.engine)
        self.log = None if log is None else EpochLog(trackers=make_trackers(log))  # takes a line after every epoch
        self.checkpointer: Checkpointer | None = None  # saves the state of fits
        self.after_epoch: Callable[[Method, FitResult], None] | None = None  # it may add to what the result has
        self.tasks: Sequence[Task] = ()  # all tasks of the run, if they are known
        # Waits until the step of a task is compiled in another process, of a stack with so many lanes.
        self.wait_for_code: Callable[[Task, int], None] | None = None
        self.ranks: Ranks | None = None  # the processes that share the batches of this run
        self.stopwatch = Stopwatch()  # where the time of fits goes
        self.count_costs = False  # whether fits count the operations of their steps and measure memory, for a record
        self.fits: list[FitResult] = []
        self.carried: WeakKeyDictionary[Method, CarriedState] = WeakKeyDictionary()

    def __repr__(self) -> str:
        options: dict[str, tuple[Any, Any]] = {"seed": (self.seed, 0), "watch": (self.watch, False)}
        options |= {"engine": (self.engine, "auto"), "precision": (self.precision, None), "augment": (self.augment, None)}
        given = [f"{name}={value!r}" for name, (value, default) in options.items() if value != default]
        done = f"; {len(self.fits)} {'fit' if len(self.fits) == 1 else 'fits'} done" if self.fits else ""
        return f"Trainer({', '.join([repr(self.regime), *given])}{done})"

    def start(
        self, method: Method, task: Task, *, plain: dict[nn.Parameter, float] | None = None, **changes: Any
    ) -> FitLoop:
        """Prepare a fit; the arguments are those of a call.

        Returns:
            The fit, ready for its first epoch.
        """
        method.net.check_task(task)
        task = to_device(task, method.net.example.device)
        regime = self._regime(task, changes)
        task = self._augmented(task, regime)
        self.check_tasks()
        if isinstance(task.train.task, int):  # not a union of several tasks
            method.net.set_preprocessing(task)
        carried = self.carried.setdefault(method, CarriedState())
        number = carried.fits[task.index]
        carried.fits[task.index] += 1
        seed = derive(self.seed, "task", task.index, "fit", number)
        steps = self.count_steps(type(method), task, regime, len(method.net.classes))
        function = self.augment if callable(self.augment) else None
        engine: Engine = "eager" if function else self.engine
        loop = FitLoop(
            method, task, regime, plain or {}, seed, engine, watch=self.watch, steps=steps, count_costs=self.count_costs
        )
        loop.augment, loop.ranks, loop.stopwatch = function, self.ranks, self.stopwatch
        if loop.compiled and self.wait_for_code:
            if loop.stacked:
                loop.stacked.wait_for_code = partial(self._wait_for_code, loop, task)
            else:
                with self.stopwatch("first steps"):
                    self.wait_for_code(task, 0)
        for name, parameter in loop.weights.items() if regime.keep_state else ():
            before = carried.optimizer.get(name)
            new = loop.optimizers.main.state[parameter]
            # A parameter that has grown begins with a new state.
            if before and before.keys() == new.keys() and all(before[key].shape == new[key].shape for key in new):
                for key, value in before.items():
                    new[key].copy_(value)
        self.fits.append(loop.result)
        return loop

    def _wait_for_code(self, loop: FitLoop, task: Task, lanes: int) -> None:
        """Wait for the code of a stacked step. A run that was asked to stop meanwhile compiles nothing any more: the signal
        may have ended the helper as well, and then each form would take up to a minute here."""
        if self.wait_for_code:
            self.wait_for_code(task, lanes)
        if self.checkpointer:
            self.checkpointer.before_epoch(loop)

    def _augmented(self, task: Task, regime: Regime) -> Task:
        """Return a task with random crops and flips, if the trainer or the regime asks for them."""
        return with_crops(task) if "crop-flip" in (self.augment, regime.augment) else task

    def check_tasks(self) -> None:
        """Raise an error if the regime is not for one of `tasks`, before the first of them is trained."""
        for task in self.tasks:
            self._augmented(task, self.regime)
        check_smoothing(((task.name, task.target) for task in self.tasks), self.regime.smoothing)

    def _regime(self, task: Task, changes: dict[str, Any]) -> Regime:
        """Return the regime of a fit. A fit that a method wants to last so many epochs does not last `steps`."""
        return replace(self.regime.at(task.index), **{**({"steps": 0} if "epochs" in changes else {}), **changes})

    def count_steps(self, method: type[Method], task: Task, regime: Regime, tasks: int = 1) -> int:
        """Return how many steps at most share one compilation with those of a fit.

        They are the steps of the whole run, also when it was stopped and continues, so that its fits keep their engine. A
        trainer that does not know the run takes all `tasks` to be as long as this one.
        """
        own = max_steps(task, regime)
        if method.step_forms == "many":
            return own
        if not self.tasks:
            return own * tasks
        return max(own, sum(max_steps(other, self.regime.at(other.index)) for other in self.tasks))

    def compiles(self, method: type[Method], device: str) -> bool:
        """Return whether the steps of all tasks of the run are compiled on a type of device."""
        steps = [self.count_steps(method, task, self.regime.at(task.index)) for task in self.tasks]
        return bool(steps) and choose_engine("eager" if self.watch else self.engine, device, min(steps))[0]

    def likely_compiles(self, method: type[Method], device: str) -> bool:
        """Guess what `compiles` will return before the tasks are there, for a GPU. A wrong guess costs or saves the time in
        which torch's compiler is imported, and changes nothing else."""
        steps = self.regime.steps or LIKELY // self.regime.batch * self.regime.epochs
        guess = choose_engine("eager" if self.watch else self.engine, device, steps)[0]
        return device == "cuda" and method.step_forms != "many" and guess

    def __call__(
        self, method: Method, task: Task, *, plain: dict[nn.Parameter, float] | None = None, **changes: Any
    ) -> FitResult:
        """Train a method's parameters on a task. Users call `Method.learn`, which calls this, once or several times.

        Args:
            method: the method.
            task: the task; it is brought to the device of the method.
            plain: parameters that take plain SGD steps with a learning rate of their own, see `Fit`.
            changes: fields of the regime, for this fit alone.

        Returns:
            The result of the fit. The method has its best weights on validation data, or its last if there is none.
        """
        task = to_device(task, method.net.example.device)
        device, chosen = task.train.y.device, self.precision
        scope = precision_scope(chosen, device, cpu=True) if chosen else nullcontext()
        with own_stream(device), without_autocast_cache(), scope:
            return self._fit(method, task, plain, changes)

    def _fit(
        self, method: Method, task: Task, plain: dict[nn.Parameter, float] | None, changes: dict[str, Any]
    ) -> FitResult:
        """Fit; if that diverges and the regime says so, start again with half the learning rate."""
        regime = self._regime(task, changes)
        before = copy_trained(method)
        saved = self.checkpointer.next_fit() if self.checkpointer else None
        halved = int(saved[1]["fitted"]["halved"]) if saved else 0
        while True:
            changes["lr"] = regime.lr * 0.5**halved
            slower = {parameter: lr * 0.5**halved for parameter, lr in (plain or {}).items()}
            loop = self.start(method, task, plain=slower, **changes)
            loop.result.halved = halved
            try:
                return self._run(loop, saved, before)
            except Diverged as error:
                if regime.on_divergence != "halve" or not error.may_be_the_rate:
                    raise
                if halved >= HALVINGS:
                    rates = ", ".join(f"{regime.lr * 0.5**times:g}" for times in range(halved + 1))
                    raise Diverged(f"{error}; it ended so with every learning rate: {rates}") from None
                seen = error.seen
            warnings.warn(f"{seen}; it begins again with lr {changes['lr'] / 2:g} (seed {self.seed})", stacklevel=2)
            halved, saved = halved + 1, None

    def _run(self, loop: FitLoop, saved: State | None, before: dict[str, Tensor]) -> FitResult:
        """Carry out a fit from its first epoch, or from where it was saved, to its end. If it fails, the method gets the
        state `before` it."""
        method, task = loop.method, loop.task
        ended = self._resume(loop, saved) if saved else False
        if self.log and saved:
            self.log.restore(task.index, self._number(loop), loop.regime.epochs, loop.result)
        if self.checkpointer:
            loop.after_step = self.checkpointer.after_step
        try:
            watched = self._evaluations(method)
            with show_progress(self.progress, task, loop.regime.epochs) as show:
                while not loop.finished and not ended:
                    if self.checkpointer:
                        self.checkpointer.before_epoch(loop)
                    loop.epoch()
                    if watched:
                        with self.stopwatch("evaluation"):
                            loop.result.watched.append([evaluation().accuracy for evaluation in watched])
                    if self.after_epoch:
                        self.after_epoch(method, loop.result)
                    if self.log:
                        self.log.epoch(task.index, self._number(loop), loop.regime.epochs, loop.result)
                    show(ProgressEvent(task, len(method.net.classes), loop.regime, loop.result))
        except BaseException as error:
            self.carried[method].fits[task.index] -= 1  # another try sees the same batches
            self.fits.pop()
            loop.best = before
            loop.close()
            if isinstance(error, RuntimeError):  # perhaps the cause is known, and the message can be clearer
                seen = task.train.inputs(torch.zeros(1, dtype=torch.int64, device=task.train.y.device))
                check_precision(method.net.trunk, seen, f"task {task.name!r}")
            raise
        if not ended:
            loop.close()
        if loop.regime.keep_state:
            state = loop.optimizers.main.state
            self.carried[method].optimizer.update({name: dict(state[p]) for name, p in loop.weights.items()})
        if self.checkpointer and not ended:
            self.checkpointer.save_fit(loop, ended=True)
        method.eval()
        return loop.result

    def _number(self, loop: FitLoop) -> int:
        """Return the number of a fit among those of its task."""
        return self.carried[loop.method].fits[loop.task.index] - 1

    def _evaluations(self, method: Method) -> list[Evaluation]:
        """Return the evaluations on the test data of the watched tasks."""
        for task in self.watch_tasks:
            method.net.check_task(task)
        device = method.net.example.device
        return [Evaluation(method, to_device(task, device).test, wait=wait_for_gpu) for task in self.watch_tasks]

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

    def begin_task(self, method: Method) -> Callable[[], None]:
        """Return a function that forgets the fits of this task, for a task that could not be learned."""
        carried, done = self.carried.setdefault(method, CarriedState()), len(self.fits)
        before = CarriedState(Counter(carried.fits), dict(carried.optimizer))

        def cancel() -> None:
            self.carried[method] = before
            del self.fits[done:]

        return cancel

    def end_task(self, result: LearnResult) -> None:
        """Print one line about a task that has been learned, where progress is shown, and log it: see `TaskObserver`."""
        if self.log and result.fits:
            self.log.task(result.fits[-1].task, result.usage)
        console = None if callable(self.progress) or self.progress is False else find_console()
        if console is not None:
            console.print(printable(result), markup=False, highlight=False, soft_wrap=True)

    def state(self, method: Method) -> State:
        """Return what is carried over between fits: tensors, and metadata."""
        carried = self.carried.setdefault(method, CarriedState())
        tensors = {f"past/{name}/{key}": v for name, state in carried.optimizer.items() for key, v in state.items()}
        return tensors, {"counts": dict(carried.fits), "fits": [result.to_dict() for result in self.fits]}

    def load_state(self, method: Method, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
        """Continue with what was carried over when this state was saved."""
        carried = CarriedState(Counter({int(task): count for task, count in metadata["counts"].items()}))
        for key, value in tensors.items():
            if key.startswith("past/"):
                name, _, what = key.removeprefix("past/").rpartition("/")
                carried.optimizer.setdefault(name, {})[what] = value.to(method.net.example.device)
        self.carried[method] = carried
        self.fits = [FitResult(**{**fit, "epochs": [EpochResult(*e) for e in fit["epochs"]]}) for fit in metadata["fits"]]
