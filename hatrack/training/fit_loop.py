"""One fit: the training step, the loop over epochs, and the state from which an interrupted fit continues."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hatrack.engine.choice import Engine, choose_engine
from hatrack.engine.compiled import Compiled
from hatrack.engine.interleaving import stacking, step_done, wait_for_gpu
from hatrack.engine.padding import Padding
from hatrack.engine.recorded import Recorded
from hatrack.engine.rules import watch_step, watched
from hatrack.engine.stacked_form import RunStep
from hatrack.engine.stacked_steps import StackedSteps
from hatrack.methods.divergence import Diverged
from hatrack.methods.evaluate import Evaluation, Score
from hatrack.methods.fit import EpochResult, FitResult
from hatrack.methods.method import Method
from hatrack.methods.parts.snapshot import copy_trained
from hatrack.networks.packed_heads import pack
from hatrack.regime import LRSchedule, Regime
from hatrack.seeds import derive, generator, seeded
from hatrack.tasks.batches import count_batches
from hatrack.tasks.split import Batch
from hatrack.tasks.targets import CLASSES, other_score
from hatrack.tasks.task import Task
from hatrack.tasks.transform import draw_crops
from hatrack.training.augmentation import augmented
from hatrack.training.best_epoch import stands_still, to_lower, warn_of_no_effect, warn_of_no_score
from hatrack.training.checkpoint import random_state, set_random_state
from hatrack.training.checkpoint_schema import misfit
from hatrack.training.epoch_sizes import count_examples, full_batch, max_steps, room_for_losses
from hatrack.training.fit_costs import FitCosts
from hatrack.training.fit_optimizers import Optimizers
from hatrack.training.gradients import backward, backward_in_parts, backward_on_rank
from hatrack.training.paddings import fades, head_paddings, is_ours
from hatrack.training.prefetch import Prefetcher
from hatrack.training.ranks import Ranks
from hatrack.training.step_errors import diverged, single_example
from hatrack.training.stopwatch import Stopwatch


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
        self.rule = partial(watch_step, method, self.optimizers.all)
        # Compiled on fetched examples, so that the size of a data set makes no other form.
        size = full_batch(task, regime)
        self.compiled = Compiled(self.train_step, size, self.rule, self._paddings) if compiled else None
        self.step_on: Callable[..., Tensor] = self.compiled or self.train_step
        if watch:
            self.step_on = watched(self.train_step, method, self.optimizers.all)
        alone: Callable[[Tensor, Tensor], Tensor] = Recorded(self._fetch_and_step) if record else self._fetch_and_step
        self.stacked = self._stack(alone, compiled=compiled, record=record) if stacking() is not None and not watch else None
        self.step: Callable[[Tensor, Tensor], Any] = self.stacked or alone
        self.records = record
        self.validate = self._evaluation()
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
        self.stopwatch = Stopwatch()

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
        loss, aux = self._backward(batch)
        with torch.no_grad():
            self.method.edit_grads(batch, aux)
            self.optimizers.step(self.regime.clip)
            self.method.constrain()
            return self.losses.index_copy_(0, number, loss.detach().float())

    def _backward(self, batch: Batch) -> tuple[Tensor, Any]:
        """Compute the gradients of a batch; return the loss, and what `edit_grads` needs of its computation."""
        parts = self.regime.accumulate
        if parts == 1:
            return backward(self.method, batch)
        if self.ranks is None:
            return backward_in_parts(self.method, batch, parts), None
        seed = derive(self.seed, "dropout", len(self.result.epochs), self.step_index, self.ranks.rank)
        parameters = list(self.method.parameters())
        parameters = self.packed.replace(parameters) if self.packed else parameters
        return backward_on_rank(self.method, parameters, batch, parts, self.ranks, seed), None

    def _fetch_and_step(self, index: Tensor, number: Tensor) -> Tensor:
        """`step` as it is before it is recorded: the numbers of the batch's examples, and the number of the batch."""
        return self.step_on(*self._fetched(index, number))

    def _fetched(self, index: Tensor, number: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs of `train_step`."""
        return *self.prefetcher.split.fetch(index), number

    def _stack(self, alone: Callable[[Tensor, Tensor], Tensor], *, compiled: bool, record: bool) -> StackedSteps:
        """Do full batches together with those of other runs."""
        step = RunStep(self.train_step, self.rule, compiled, self._paddings)
        return StackedSteps(step, alone, self.prefetcher.source, full_batch(self.task, self.regime), record=record)

    def _paddings(self) -> list[Padding]:
        """Return what makes the task's own head as wide as that of any task, so that tasks with others share a form."""
        plain = is_ours(self.method) and not self.method.net.mixed and self.prefetcher.split.target is CLASSES
        if not plain or fades(self.regime, max_steps(self.task, self.regime)):
            return []
        return head_paddings(self.method.net, self.task.index, self.optimizers.main.state)

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
        with self.stopwatch("steps"):
            loss = self.train_epoch(number)
        with self.stopwatch("validation"):
            score = self._validated() if len(self.task.valid) else None
        if score is not None and not math.isfinite(score.loss):
            raise self._diverged(f"validation loss is {score.loss}")
        warn_of_no_score(score, self.result.epochs, self.task, self.regime)
        self.result.epochs.append(EpochResult(self.schedule.lr, loss, *(score or (None, None))))
        self.costs.add_up([count_examples(self.task, self.regime, k) for k in range(number + 1)], self.regime.batch)
        better = self.schedule.end(loss if score is None else to_lower(score, self.regime))
        self.schedule.finished |= stands_still(self.result.epochs, self.regime)
        if better and score is not None and self.regime.restore:
            self.best = copy_trained(self.method)
        if better or not self.best:
            self.result.best = number

    def _validated(self) -> Score:
        """Return the loss and the score on validation data. The loss has what the method adds to it."""
        if self.places != self._places():
            self.validate = self._evaluation()
        score = self.validate()
        return Score(score.loss + self.method.validation_price(self.task.index), score.accuracy)

    def _evaluation(self) -> Evaluation:
        """Return the evaluation on validation data. One that is recorded holds the addresses of the weights."""
        self.places = self._places()
        wrap = Recorded if self.records and self.task.valid.stream is None else None
        return Evaluation(self.method, self.task.valid, wrap=wrap, wait=wait_for_gpu)

    def _places(self) -> list[int]:
        """Return where the weights lie in memory: a compiled step may move those of the head, a stack all of them."""
        return [weight.data_ptr() for weight in self.weights.values()]

    def train_epoch(self, epoch: int) -> float:
        """All steps of an epoch; return the mean loss of the examples, read from the device once at the end."""
        sizes = []
        self.method.train()
        self.costs.begin()
        with seeded(self.seed, "dropout", epoch), self.method.while_fitting():
            order = torch.randperm(len(self.task.train), generator=generator(self.seed, "batches", epoch)).to(self.device)
            order = order[: count_examples(self.task, self.regime, epoch)]
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
                    if alone := single_example(error, self.task, self.regime, len(index)):
                        raise alone from error
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

    def _warm_up(self, epoch: int, done: int) -> None:
        """Set the learning rate of a step at the beginning of the fit, where it grows from step to step."""
        step, slow = epoch * count_batches(len(self.task.train), self.regime.batch) + done, self.regime.warmup
        if slow and step <= slow:
            self._flush()
            self.optimizers.set_lr(self.schedule.lr * min(1.0, (step + 1) / slow))

    def _counted_step(self, index: Tensor, number: Tensor) -> None:
        """Do a step. The first one with a batch of this size is compiled, if steps are, and counted."""
        if self.costs.asks_for(len(index)):
            with self.stopwatch("first steps"):
                self._first_step(index, number)
        else:
            self.step(index, number)

    def _first_step(self, *inputs: Tensor) -> None:
        size = len(inputs[0])
        self._flush()
        if self.stacked:
            self.costs.count_trial(self.train_step, self._fetched(*inputs), size)
            self.step(*inputs)
        elif self.compiled and size == self.compiled.size:
            self.step(*inputs)
            self.costs.count_compiled(self.compiled, lambda: self._fetched(*inputs))
        else:
            self.costs.count(self.step, inputs, size, self.ranks, keep=self.compiled is not None)

    def _read_losses(self) -> list[float]:
        """The losses of this epoch's steps so far; an error if one is not finite."""
        self._flush()
        losses: list[float] = self.losses[: self.step_index].tolist()
        for step, loss in enumerate(losses):
            if not math.isfinite(loss):
                raise self._diverged(f"loss is {loss}", step)
        return losses

    def _diverged(self, what: str, step: int | None = None) -> Diverged:
        """Make the error of a loss that is not finite."""
        regime = replace(self.regime, lr=self.schedule.lr or self.regime.lr)
        return diverged(self.method, self.task, regime, what, len(self.result.epochs), step)

    # Saving and continuing

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that the rest of the fit depends on: tensors, and metadata. A fit that has diverged has none."""
        self._read_losses()
        tensors = {f"method/{key}": value for key, value in self.method.state_dict().items()}
        tensors |= {f"best/{key}": value for key, value in self.best.items()}
        tensors |= {f"optimizer/{key}": value for key, value in self.optimizers.tensors(self.weights).items()}
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
        kept = self.optimizers.tensors(self.weights)
        for key, value in groups["optimizer"].items():
            kept[key].copy_(value)
        self.losses.copy_(tensors["losses"])
        self.result.load(metadata["fitted"], ended=metadata.get("ended", False))
        self.costs.load_state(metadata.get("flops", {}))
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
        if self.compiled:
            self.compiled.close()
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
