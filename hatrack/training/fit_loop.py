"""One fit: the training step, the loop over epochs, and the state from which an interrupted fit continues."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hatrack.engine.choice import Engine, choose_engine
from hatrack.engine.compiled import Compiled
from hatrack.engine.interleaving import stacking, step_done, wait_for_gpu
from hatrack.engine.recorded import Recorded
from hatrack.engine.rules import watch_step, watched
from hatrack.engine.stacked_form import Padding, RunStep
from hatrack.engine.stacked_steps import StackedSteps
from hatrack.methods.divergence import NOT_THE_RATE, Diverged
from hatrack.methods.evaluate import Evaluation, Score
from hatrack.methods.fit import EpochResult, FitResult
from hatrack.methods.method import Method
from hatrack.methods.parts.snapshot import copy_trained
from hatrack.networks.packed_heads import pack
from hatrack.regime import LRSchedule, Regime
from hatrack.seeds import derive, generator, seeded
from hatrack.tasks.batches import count_batches, split_batches
from hatrack.tasks.split import Batch, TaskId
from hatrack.tasks.targets import CLASSES, other_score
from hatrack.tasks.task import Task
from hatrack.tasks.transform import draw_crops
from hatrack.training.augmentation import augmented
from hatrack.training.best_epoch import stands_still, to_lower, warn_of_no_effect, warn_of_no_score
from hatrack.training.checkpoint import random_state, set_random_state
from hatrack.training.checkpoint_schema import misfit
from hatrack.training.fit_costs import FitCosts
from hatrack.training.fit_optimizers import Optimizers
from hatrack.training.prefetch import Prefetcher
from hatrack.training.ranks import Ranks

UNLIKELY = -1e15  # the logit of a class that a task does not have
FADED = 10.0  # weight decay makes such a logit smaller; it stays unlikely if the sum of all decays is at most this


def max_steps(task: Task, regime: Regime) -> int:
    """Return how many steps a fit of a task has at most."""
    return regime.steps or count_batches(len(task.train), regime.batch) * regime.epochs


def room_for_losses(batches: int) -> int:
    """Return the size of the buffer for the losses of an epoch. It is the same for tasks of about the same size, so that
    their steps are compiled once."""
    return int(2 ** max(10, batches.bit_length()))


class FitLoop:
    """One fit of a method to a task.

    What changes from epoch to epoch are the method, the optimizers, the schedule, the result so far and the best state;
    an epoch depends on nothing else.

    Args:
        method: the method, whose parameters are trained.
        task: the task; its data lie on the method's device.
        regime: the regime of this fit.
        plain: parameters that take plain SGD steps, with their learning rates.
        seed: decides the order of batches, dropout and crops.
        engine: how steps run: eagerly, compiled or recorded.
        watch: check that every step obeys the rule of the step.
        steps: how many steps at most share one compilation, by which "auto" chooses the engine; None: those of this fit.
        count_costs: count the floating-point operations of steps, and measure memory.
    """

    def __init__(
        self,
        method: Method,
        task: Task,
        regime: Regime,
        plain: dict[nn.Parameter, float],
        seed: int,
        engine: Engine = "eager",
        *,
        watch: bool = False,
        steps: int | None = None,
        count_costs: bool = False,
    ) -> None:
        regime = regime.in_epochs(count_batches(len(task.train), regime.batch))
        self.method, self.task, self.regime, self.seed = method, task, regime, seed
        self.weights = {name: p for name, p in method.named_parameters() if p.requires_grad and p not in plain}
        if not self.weights:
            raise ValueError(f"task {task.name!r}: the method has no parameter to train")
        if regime.accumulate > 1 and not method.splits_batches:
            raise ValueError(
                f"accumulate={regime.accumulate} is not for {type(method).__name__}, whose loss needs whole batches"
            )
        warn_of_no_effect(task, regime)
        self.device, batches = task.train.y.device, count_batches(len(task.train), regime.batch)
        steps = max_steps(task, regime) if steps is None else steps
        compiled, record = choose_engine("eager" if watch else engine, self.device.type, steps)
        # With kept states every head has its own count of Adam's steps; packed heads have one for all.
        self.packed = None if regime.keep_state and "adam" in regime.optimizer else pack(method.net)
        weights = list(self.weights.values())
        self.optimizers = Optimizers(regime, self.packed.replace(weights) if self.packed else weights, plain)
        self._follow()
        crops = torch.zeros(len(task.train), 3, dtype=torch.int64, device=self.device) if task.train.augment else None
        target = task.train.target.smoothed(regime.smoothing)
        train = task.train if stacking() is None else task.train.laid_out()
        self.prefetcher = Prefetcher(replace(train, crops=crops, target=target), regime.batch)
        self.losses = torch.zeros(room_for_losses(batches), dtype=torch.float32, device=self.device)  # of an epoch's steps
        self.batches = torch.full((), batches, device=self.device)
        self.compiled = self._compile() if compiled else None
        self.step_on: Callable[..., Tensor] = self.compiled or self.train_step
        if watch:
            self.step_on = watched(self.train_step, method, self.optimizers.all)
        alone: Callable[[Tensor, Tensor], Tensor] = Recorded(self._fetch_and_step) if record else self._fetch_and_step
        self.stacked = self._stack(alone, compiled=compiled, record=record) if stacking() is not None and not watch else None
        self.step: Callable[[Tensor, Tensor], Any] = self.stacked or alone
        wrap = Recorded if record and task.valid.stream is None else None
        self.validate = Evaluation(method, task.valid, wrap=wrap, wait=wait_for_gpu)
        self.records = record
        self.schedule = LRSchedule(regime)
        self.engine = "compiled" if compiled else "recorded" if record else "eager"
        way = f"{self.engine}, stacked" if self.stacked else self.engine
        self.result = FitResult(task.index, engine=way, score=other_score(task.target))
        self.costs = FitCosts(method, self.optimizers, self.device, self.result, measure=count_costs)
        self.best: dict[str, Tensor] = {}
        self.step_index = 0  # how many steps of the present epoch are done
        self.resumed: dict[str, Tensor] = {}  # the state of the generators, if the fit continues within an epoch
        self.after_step: Callable[[FitLoop], None] | None = None
        self.augment: Callable[[Tensor], Tensor] | None = None  # of the images of a step; then steps run eagerly
        self.ranks: Ranks | None = None  # the processes that share the parts of every batch; then steps run eagerly

    # The step

    def train_step(self, *inputs: Tensor) -> Tensor:
        """One training step; the loss is written to `losses`.

        The inputs are what was fetched of the batch's examples and, last, the number of the batch in its epoch. They are
        all that varies from step to step, so that the step can be recorded; `methods/method.py` states the rule it obeys.
        """
        if self.packed is None:
            return self._train_step(*inputs)
        self.packed.in_step = True
        try:
            return self._train_step(*inputs)
        finally:
            self.packed.in_step = False

    def _train_step(self, *inputs: Tensor) -> Tensor:
        """`train_step`, with heads packed or not."""
        *parts, number = inputs
        self.optimizers.zero_grad()
        batch = self.prefetcher.split.batch(parts, number, self.batches, self.regime.batch)
        if self.augment:
            x = augmented(batch.x, self.augment, self.seed, len(self.result.epochs), self.step_index)
            batch = batch._replace(x=x)
        loss, aux = self._backward(batch) if self.regime.accumulate == 1 else (self._backward_in_parts(batch), None)
        with torch.no_grad():
            self.method.edit_grads(batch, aux)
            self.optimizers.step(self.regime.clip)
            self.method.constrain()
            return self.losses.index_copy_(0, number, loss.detach().float())

    def _backward(self, batch: Batch) -> tuple[Tensor, Any]:
        """Compute the gradients of a batch; return the loss, and what `edit_grads` needs of its computation."""
        found: Any = self.method.loss(batch)
        loss, aux = found if isinstance(found, tuple) else (found, None)
        loss.backward()
        return loss, aux

    def _backward_in_parts(self, batch: Batch) -> Tensor:
        """Compute the gradients of a batch one part after the other, which takes less memory; return the loss."""
        count, losses = self.regime.accumulate, []
        x, y, target = batch.x.chunk(count), batch.y.chunk(count), batch.target.for_parts(batch.y)
        tasks: Sequence[TaskId] = batch.task.chunk(count) if isinstance(batch.task, Tensor) else [batch.task] * len(y)
        for k, task in enumerate(tasks):
            if self.ranks and k != self.ranks.rank:
                continue
            with self._dropout_of_rank():
                found: Any = self.method.loss(batch._replace(x=x[k], y=y[k], task=task, target=target))
            losses.append(found * (len(y[k]) / len(batch.y)))
            losses[-1].backward()
        if self.ranks:
            return self.ranks.sum_parts(list(self.method.parameters()), losses[0].detach() if losses else None)
        return torch.stack(losses).sum()

    @contextmanager
    def _dropout_of_rank(self) -> Iterator[None]:
        """On ranks, every part of every step draws from a generator of its own; what all ranks draw stays the same."""
        if self.ranks is None:
            yield
            return
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(derive(self.seed, "dropout", len(self.result.epochs), self.step_index, self.ranks.rank))
            yield

    def _fetch_and_step(self, index: Tensor, number: Tensor) -> Tensor:
        """`step` as it is before it is recorded: the numbers of the batch's examples, and the number of the batch."""
        return self.step_on(*self.prefetcher.split.fetch(index), number)

    def _compile(self) -> Compiled:
        """Compile the step on fetched examples, so that the size of a data set makes no other form."""
        return Compiled(self.train_step, self._whole, partial(watch_step, self.method, self.optimizers.all))

    @property
    def _whole(self) -> int:
        """How many examples a full batch has."""
        return len(split_batches(torch.arange(len(self.task.train)), self.regime.batch)[0])

    def _stack(self, alone: Callable[[Tensor, Tensor], Tensor], *, compiled: bool, record: bool) -> StackedSteps:
        """Do full batches together with those of other runs."""
        rule = partial(watch_step, self.method, self.optimizers.all)
        step = RunStep(self.train_step, rule, compiled, self._paddings)
        return StackedSteps(step, alone, self.prefetcher.source, self._whole, record=record)

    def _paddings(self) -> list[Padding]:
        """Give the task's own head as many classes as any task has, so that tasks with other numbers of classes are stacked.
        Those that are too many are so unlikely that the loss and all gradients are as without them, and stay so."""
        net, target = self.method.net, self.prefetcher.split.target
        most, own = max(net.classes), net.classes[self.task.index]
        if net.shared or net.incremental or self.packed or most == own or target is not CLASSES or self._fades():
            return []
        found = []
        for name, parameter in net.heads[self.task.index].named_parameters():
            found.append(Padding(parameter, most, UNLIKELY if name == "bias" else 0.0))
            states = self.optimizers.main.state.get(parameter, {}).values()
            found += [Padding(state, most, 0.0) for state in states if state.shape == parameter.shape]
        return found

    def _fades(self) -> bool:
        """Return whether weight decay brings a number near 0 in the steps of this fit, or with momentum even beyond it."""
        regime = self.regime
        momentum = regime.momentum if regime.optimizer == "momentum" else 0.0
        decay = regime.lr * regime.weight_decay
        return decay > (1 - momentum**0.5) ** 2 or decay * max_steps(self.task, regime) / (1 - momentum) > FADED

    def _flush(self) -> None:
        """Wait until all steps are done, if they are stacked: then what they use may be read and changed."""
        if self.stacked:
            self.stacked.flush()
            self._follow()

    def _follow(self) -> None:
        """Let packed heads be views of the memory that steps use now."""
        if self.packed:
            self.packed.follow(self.optimizers.main.state)

    # Epochs

    @property
    def finished(self) -> bool:
        """Whether the last epoch is done."""
        return self.schedule.finished or len(self.result.epochs) >= self.regime.epochs

    def epoch(self) -> None:
        """Train on the training data once, then validate."""
        number = len(self.result.epochs)
        self.optimizers.set_lr(self.schedule.start(number))
        loss = self.train_epoch(number)
        score = self._validated() if len(self.task.valid) else None
        if score is not None and not math.isfinite(score.loss):
            raise self._diverged(f"validation loss is {score.loss}")
        warn_of_no_score(score, self.result.epochs, self.task, self.regime)
        self.result.epochs.append(EpochResult(self.schedule.lr, loss, *(score or (None, None))))
        self.costs.add_up(map(self._count_examples, range(number + 1)), self.regime.batch)
        better = self.schedule.end(loss if score is None else to_lower(score, self.regime))
        self.schedule.finished |= stands_still(self.result.epochs, self.regime)
        if better and score is not None and self.regime.restore:
            self.best = copy_trained(self.method)
        if better or not self.best:
            self.result.best = number

    def _validated(self) -> Score:
        """Return the loss and the score on validation data. The loss has what the method adds to it."""
        score = self.validate()
        return Score(score.loss + self.method.validation_price(self.task.index), score.accuracy)

    def train_epoch(self, epoch: int) -> float:
        """All steps of an epoch; return the mean loss of the examples, read from the device once at the end."""
        sizes = []
        self.method.train()
        self.costs.begin()
        with seeded(self.seed, "dropout", epoch), self.method.while_fitting():
            order = torch.randperm(len(self.task.train), generator=generator(self.seed, "batches", epoch)).to(self.device)
            order = order[: self._count_examples(epoch)]
            if self.prefetcher.split.crops is not None:
                self.prefetcher.split.crops.copy_(draw_crops(len(self.task.train), generator(self.seed, "crops", epoch)))
            numbers = torch.arange(count_batches(len(order), self.regime.batch), device=self.device)
            self.batches.fill_(len(numbers))
            if self.resumed:
                set_random_state(self.resumed, self.device)
            if self.stacked:
                self.stacked.begin_epoch(order, self.regime.batch, self.step_index)
            batches = self.prefetcher(order, done=self.step_index, seed=derive(self.seed, "transforms", epoch))
            for done, (number, index) in enumerate(zip(numbers, batches, strict=True)):
                sizes.append(len(index))
                if done < self.step_index:
                    continue  # this step was done before the run was stopped
                self._warm_up(epoch, done)
                try:
                    self._counted_step(index, number)
                except ValueError as error:
                    if said := self._explain(error, len(index)):
                        raise ValueError(said) from error
                    raise
                self.step_index = done + 1
                if not self.stacked:
                    step_done()
                if self.after_step:
                    self.after_step(self)
            self._flush()
        wait_for_gpu()
        losses = self._read_losses()
        self.costs.note_peak()
        self.step_index, self.resumed = 0, {}
        return math.fsum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)

    def _explain(self, error: ValueError, examples: int) -> str:
        """Return the error of a step in clear words if a batch norm was given a single example, otherwise an empty text."""
        parts = torch.arange(examples).chunk(self.regime.accumulate)
        if "more than 1 value per channel" not in str(error) or len(parts[-1]) > 1:
            return ""
        of = f"accumulate={self.regime.accumulate} leaves 1 example in a part of a batch of {examples}"
        what = of if len(parts) > 1 else f"a batch of {examples} example"
        return f"task {self.task.name!r}: {what}, and a batch norm needs at least 2 (a larger batch or fewer parts)"

    def _warm_up(self, epoch: int, done: int) -> None:
        """Set the learning rate of a step at the beginning of the fit, where it grows from step to step."""
        step, slow = epoch * count_batches(len(self.task.train), self.regime.batch) + done, self.regime.warmup
        if slow and step <= slow:
            self._flush()
            self.optimizers.set_lr(self.schedule.lr * min(1.0, (step + 1) / slow))

    def _counted_step(self, index: Tensor, number: Tensor) -> None:
        """Do a step. The first one with a batch of this size is counted."""
        size = len(index)
        if not self.costs.asks_for(size):
            self.step(index, number)
            return
        self._flush()
        inputs = index, number
        if self.stacked:
            self.costs.count_trial(self.train_step, self._fetched(*inputs), size)
            self.step(*inputs)
        elif self.compiled and size == self.compiled.size:
            self.step(*inputs)
            self.costs.count_compiled(self.compiled, lambda: self._fetched(*inputs))
        else:
            self.costs.count(self.step, inputs, size, self.ranks, keep=self.compiled is not None)

    def _fetched(self, index: Tensor, number: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs of `train_step`."""
        return *self.prefetcher.split.fetch(index), number

    def _count_examples(self, epoch: int) -> int:
        """Return how many examples an epoch has: all, or in the last epoch those of the steps that are left."""
        examples, batch = len(self.task.train), self.regime.batch
        batches = count_batches(examples, batch)
        left = self.regime.steps - epoch * batches
        return left * batch if self.regime.steps and left < batches else examples

    def _read_losses(self) -> list[float]:
        """The losses of this epoch's steps so far; an error if one is not finite."""
        self._flush()
        losses: list[float] = self.losses[: self.step_index].tolist()
        for step, loss in enumerate(losses):
            if not math.isfinite(loss):
                raise self._diverged(f"loss is {loss}", step)
        return losses

    def _diverged(self, what: str, step: int | None = None) -> Diverged:
        """Make the error: where it happened, what is not finite, the likely cause and what to try."""
        epoch, regime = len(self.result.epochs), replace(self.regime, lr=self.schedule.lr or self.regime.lr)
        where = f"task {self.task.name!r}, epoch {epoch + 1}"
        where += "" if step is None else f", step {step + 1} of {count_batches(len(self.task.train), self.regime.batch)}"
        untouched = epoch == 0 and step == 0
        error = Diverged(f"{where}: the {what}; {NOT_THE_RATE if untouched else self.method.explain_divergence(regime)}")
        error.seen, error.may_be_the_rate = f"{where}: the {what}", not untouched
        return error

    # Saving and continuing

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that the rest of the fit depends on: tensors, and metadata. A fit that has diverged has none."""
        self._read_losses()
        tensors = {f"method/{key}": value for key, value in self.method.state_dict().items()}
        tensors |= {f"best/{key}": value for key, value in self.best.items()}
        for name, parameter in self.weights.items():
            tensors |= {f"optimizer/{name}/{key}": v for key, v in self.optimizers.main.state.get(parameter, {}).items()}
        tensors |= {"losses": self.losses, **random_state(self.device)}
        metadata = {"fitted": self.result.to_dict(), "pace": self.schedule.state(), "place": self.step_index}
        metadata["flops"] = self.costs.state()
        return tensors, metadata

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
        """Continue from a saved state."""
        if wrong := misfit(tensors, self.state()[0], self.weights):
            raise ValueError(f"the saved state of a fit to task {self.task.name!r} does not fit: {wrong}")
        groups: dict[str, dict[str, Tensor]] = {"method": {}, "best": {}, "optimizer": {}}
        for key, value in tensors.items():
            group, _, name = key.partition("/")
            groups.setdefault(group, {})[name] = value
        for key, value in self.method.state_dict().items():
            value.copy_(groups["method"][key])
        self.best = {key: value.to(self.device) for key, value in groups["best"].items()}
        for key, value in groups["optimizer"].items():
            name, _, what = key.rpartition("/")
            self.optimizers.main.state[self.weights[name]][what].copy_(value)
        self.losses.copy_(tensors["losses"])
        saved = metadata["fitted"]
        self.result.epochs[:] = [EpochResult(*epoch) for epoch in saved["epochs"]]
        self.result.best, self.result.halved = saved["best"], saved["halved"]
        self.result.watched[:], self.result.used[:] = saved.get("watched", []), saved.get("used", [])
        for cost in ("steps", "examples", "flops", "peak_bytes"):
            setattr(self.result, cost, saved.get(cost))
        self.costs.load_state(metadata.get("flops", {}))
        if metadata.get("ended"):
            self.result.engine = saved["engine"]
        self.schedule.load_state(metadata["pace"])
        self.step_index = metadata["place"]
        self.resumed = tensors if self.step_index else {}

    @torch.no_grad()
    def close(self) -> FitResult:
        """Write the best state into the method, drop all gradients and recordings, and return what the fit came to."""
        if self.stacked:
            self.stacked.close()
            self._follow()
            self.result.engine = self.engine if self.stacked.failed else self.result.engine
        for key, value in self.method.state_dict().items():
            if key in self.best:
                value.copy_(self.best[key])
        self.optimizers.zero_grad()
        self.method.eval()
        if self.compiled and self.compiled.failed:
            self.result.engine = "recorded" if self.records else "eager"
        self.step = self._fetch_and_step  # what was recorded gives its memory back
        self.validate.forget_recording()
        return self.result
