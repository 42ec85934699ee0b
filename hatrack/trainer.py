"""The one training loop: the step, and the Trainer that fits a method to a task by a regime."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hatrack.evaluate import evaluate
from hatrack.method import Method
from hatrack.regime import Pace, Regime
from hatrack.seeds import derive, generator
from hatrack.task import Split, Task


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


Progress = Callable[[Task, Regime, Fitted], None]  # called after every epoch
Step = Callable[[Tensor, Tensor], Tensor]


def make_step(
    method: Method, split: Split, regime: Regime, optimizers: list[torch.optim.Optimizer], clipped: list[nn.Parameter]
) -> Step:
    """The step: the numbers of a batch's examples and its place in the epoch go in, the loss comes out.

    These two tensors are all that varies, so that the step can be recorded; `method.py` states the rule that it obeys.
    """
    steps = torch.full((), math.ceil(len(split) / regime.batch), device=split.y.device)

    def step(index: Tensor, number: Tensor) -> Tensor:
        batch = split.take(index, number, steps, regime.batch)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss = method.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            method.edit_grads(batch)
            if regime.clip:
                nn.utils.clip_grad_norm_(clipped, regime.clip, foreach=True)
            for optimizer in optimizers:
                optimizer.step()
            method.constrain()
        return loss.detach()

    return step


class Optimizers:
    """The regime's optimizer on a method's weights, and plain SGD on the parameters that have rates of their own."""

    def __init__(self, regime: Regime, weights: list[nn.Parameter], plain: dict[nn.Parameter, float]) -> None:
        self.first = regime.lr
        device = next(iter([*weights, *plain])).device
        self.lrs = [torch.full((), lr, device=device) for lr in (regime.lr, *plain.values())]
        self.starts = [regime.lr, *plain.values()]
        self.main = regime.make_optimizer(weights, self.lrs[0])
        self.all = [self.main, *(torch.optim.SGD([p], lr=r, fused=True) for p, r in zip(plain, self.lrs[1:], strict=True))]

    def set_lr(self, lr: float) -> None:
        for tensor, start in zip(self.lrs, self.starts, strict=True):
            tensor.fill_(start * (lr / self.first))


class Trainer:
    """Fits methods to tasks by one regime: `fit = Trainer(Regime(epochs=20)); method.learn(task, fit)`.

    Two methods at one seed see the same batches: their order depends on the seed, the task, the fit and the epoch alone.
    """

    def __init__(self, regime: Regime | None = None, *, seed: int = 0, progress: Progress | None = None) -> None:
        self.regime = regime or Regime()
        self.seed = seed
        self.progress = progress
        self.fits: list[Fitted] = []
        self.kept: dict[str, dict[str, Any]] = {}  # the optimizer's state by parameter name, when it is kept

    def __call__(
        self, method: Method, task: Task, *, plain: dict[nn.Parameter, float] | None = None, **changes: Any
    ) -> Fitted:
        """See `method.Fit`. The method ends up with its best weights on validation data, or the last if there is none."""
        plain = plain or {}
        regime = replace(self.regime.at(task.index), **changes)
        weights = {name: p for name, p in method.named_parameters() if p.requires_grad and p not in plain}
        if not weights:
            raise ValueError(f"task {task.name!r}: the method has no parameter to train")
        optimizers = Optimizers(regime, list(weights.values()), plain)
        if regime.keep_state:
            optimizers.main.state.update({p: self.kept[name] for name, p in weights.items() if name in self.kept})
        step = make_step(method, task.train, regime, optimizers.all, list(weights.values()))
        fitted = Fitted(task.index)
        place = ("task", task.index, "fit", sum(f.task == task.index for f in self.fits))
        self.fits.append(fitted)
        best = self._epochs(method, task, regime, step, optimizers, fitted, place)
        with torch.no_grad():
            for name, value in method.state_dict().items():
                if name in best:
                    value.copy_(best[name])
        if regime.keep_state:
            self.kept.update({name: dict(optimizers.main.state[p]) for name, p in weights.items()})
        for optimizer in optimizers.all:
            optimizer.zero_grad(set_to_none=True)
        return fitted

    def _epochs(
        self,
        method: Method,
        task: Task,
        regime: Regime,
        step: Step,
        optimizers: Optimizers,
        fitted: Fitted,
        place: tuple[str | int, ...],
    ) -> dict[str, Tensor]:
        """Train until the regime says stop; returns the state of the best epoch on validation data, if there is any."""
        best: dict[str, Tensor] = {}
        pace = Pace(regime)
        method.train()
        with torch.random.fork_rng():
            for epoch in range(regime.epochs):
                optimizers.set_lr(pace.start(epoch))
                torch.manual_seed(derive(self.seed, "dropout", *place, epoch))
                loss = self._epoch(step, task.train, regime, generator(self.seed, "batches", *place, epoch))
                if not math.isfinite(loss):
                    raise Diverged(
                        f"task {task.name!r}, epoch {epoch + 1}: the loss is {loss}; try a smaller lr than {pace.lr:g}"
                    )
                score = evaluate(method, task.valid) if len(task.valid) else None
                fitted.epochs.append(Epoch(pace.lr, loss, *(score or (None, None))))
                better = pace.end(loss if score is None else score.loss)
                if better and score is not None and regime.restore:
                    best = {k: v.clone() for k, v in method.state_dict().items()}
                if better or not best:
                    fitted.best = epoch
                if self.progress:
                    self.progress(task, regime, fitted)
                if pace.over:
                    break
        return best

    def _epoch(self, step: Step, split: Split, regime: Regime, order: torch.Generator) -> float:
        """One pass over the data; the mean loss of its examples, read once at the end."""
        device = split.y.device
        shuffled = torch.randperm(len(split), generator=order).to(device)
        total = torch.zeros((), dtype=torch.float64, device=device)
        batches = torch.split(shuffled, regime.batch)
        for number, index in zip(torch.arange(len(batches), device=device), batches, strict=True):
            total += step(index, number) * len(index)
        return total.item() / len(split)
