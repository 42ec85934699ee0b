"""One task while it is learned in a loop of the user's own: its forward pass, and what happens before and after a step."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hatrack.guard import parallel
from hatrack.guard.embedding import Embedding
from hatrack.guard.frozen import FrozenBits, check_dense
from hatrack.guard.settling import inputs
from hatrack.guard.soft_gates import Gated, gate_gradient, soft_forward
from hatrack.methods.guarantees import Probes
from hatrack.methods.hat import HAT
from hatrack.methods.parts.annealing import hardness
from hatrack.methods.parts.freeze import Freeze
from hatrack.tasks.split import Batch
from hatrack.tracing.folded import LastPass

AHEAD = 1024  # steps whose hardness is computed at once


class Lesson:
    """A task that is being learned. The hardness of its gates follows the number of steps that optimizers made.

    Args:
        method: the method; the backbone must be bare.
        module: the embedding within the backbone.
        name: the name of the task.
        number: its number in the method.
        steps: how many steps of the optimizer an epoch has.
        own: the modules of this task alone.

    Attributes:
        done: how many steps have moved the gates.
    """

    def __init__(
        self, method: Gated, module: Embedding, name: str, number: int, steps: int, own: Sequence[nn.Module]
    ) -> None:
        self.method, self.module, self.name, self.number, self.steps, self.own = method, module, name, number, steps, own
        self.done = 0
        self.peaks: dict[int, float] = {}  # the largest learning rate of each optimizer so far
        self.grad: Tensor | None = None  # of the embedding, between the hooks before and after a step
        self.group: Any = None  # of processes, if DistributedDataParallel runs the backbone
        self.hooks: list[Any] = []
        self.probes = Probes({}, {})  # what finished tasks answered before
        self.frozen = FrozenBits([])  # what finished tasks use
        self.last = LastPass()  # in training mode
        self.evaluated = False  # whether a backward pass since the last step went through a pass in evaluation mode
        self.warned = False
        self.ahead: tuple[int, Tensor] | None = None  # a step of the epoch, and the hardness of it and of those after it
        self._set_hardness()

    def begin(self) -> None:
        """Freeze what finished tasks use, give the embedding and the norms their initial values, and mask gradients."""
        with _all_require_gradients(self.method):
            self.method.begin_task(self.number, self.module.embedding)
            for freeze in self.method.frozen_weights():
                if not freeze.empty:  # as they arrive, so that clipping sees them masked
                    masked = partial(_mask_on_arrival, freeze)
                    self.hooks.append(freeze.parameter.register_post_accumulate_grad_hook(masked))  # type: ignore[no-untyped-call]
        self.method.norms.lend(self.method.net, self.number)
        self.module.open()
        # Closed gates of PMASK select, so that no infinity passes; those of HAT multiply weights by 0.
        self.frozen = FrozenBits(self.method.frozen_weights(), finite=isinstance(self.method, HAT))

    def _set_hardness(self) -> None:
        """Set the hardness of the next step; that of several steps is computed at once, and lies on the device."""
        step = self.done % self.steps
        first = step - step % AHEAD
        if self.ahead is None or self.ahead[0] != first:
            number = torch.arange(first, min(first + AHEAD, self.steps))
            place = Batch(torch.empty(0), torch.empty(0), self.number, number, torch.tensor(self.steps), number / self.steps)
            found = hardness(place, self.method.smax, self.method.anneal)
            self.ahead = first, found.to(self.module.embedding.device)
        self.s = self.ahead[1][step - first]

    def follow_device(self) -> None:
        """Move everything to the device of the backbone, if a loop has moved it since, as Lightning does around `fit`."""
        device, kind = self.module.embedding.device, self.module.embedding.dtype
        if kind != torch.float32:
            raise ValueError(
                f"the backbone was cast to {str(kind).removeprefix('torch.')} while the task {self.name!r} is learned: cast "
                "it before hr.protect, or use autocast"
            )
        if self.s.device != device:
            self.method.to(device)
            self.module.follow_device()
            self.s, self.ahead = self.s.to(device), None
            self.probes = Probes(
                {task: images.to(device) for task, images in self.probes.images.items()}, self.probes.logits
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the features, in training mode with soft gates, in evaluation mode as if the task ended now."""
        self.follow_device()
        self.frozen.restore_if_changed(self.done)
        if not self.method.net.trunk.training:
            return self._evaluate(x)
        e = self.module.embedding
        if not e.requires_grad and any(p.requires_grad for p in self.method.net.trunk.parameters()):
            e.requires_grad_(True)  # the user stopped the whole backbone, and let parts of it go again
        self.group = parallel.group_of(e) or self.group
        self.last.together = self.group is None  # DDP looks for what a pass leaves out
        return soft_forward(self.method, x, self.number, self.s, self.last)

    def _evaluate(self, x: Tensor) -> Tensor:
        """Return the features in evaluation mode, and note if a backward pass goes through them."""
        features = self.method.forward(x, self.number)
        if features.requires_grad:
            features.register_hook(self._note_evaluation)  # type: ignore[no-untyped-call]
        return features

    def _note_evaluation(self, grad: Tensor) -> None:
        self.evaluated = True

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer) -> None:
        """Mask the gradients of what finished tasks use, and take the embedding's gradient away from the optimizer."""
        self.follow_device()
        self.last.end_step()
        self.frozen.mask_grads()
        taken = self.module.take(optimizer)
        if taken is not None:  # a step may call that of its base class: hooks run twice then
            self.grad = taken.neg_() if _maximizes(optimizer, self.method.net.trunk, self.module.embedding) else taken
        elif self.evaluated:
            self._tell_of_evaluation_mode(optimizer)
        self.evaluated = False

    def _tell_of_evaluation_mode(self, optimizer: Optimizer) -> None:
        """Raise an error if the first step trains the backbone in evaluation mode; warn once if a later one does."""
        what = f"step of {type(optimizer).__name__} followed a pass through the backbone in evaluation mode"
        if not self.done:
            raise ValueError(
                f"task {self.name!r}: the first {what}, in which gates are not learned: call backbone.train() before, or "
                "let the backbone require no gradients as long as only a head is trained"
            )
        if not self.warned:
            self.warned = True
            warnings.warn(
                f"task {self.name!r}: a {what}, in which gates are not learned and steps not counted: call backbone.train() "
                "after every evaluation",
                stacklevel=2,
            )

    @torch.no_grad()
    def after_step(self, optimizer: Optimizer) -> None:
        """Restore the bits of what finished tasks use, and move the embedding by plain SGD."""
        if self.grad is not None:
            grad = gate_gradient(self.method, parallel.mean(self.grad, self.group), self.s)
            self.module.embedding.sub_(grad, alpha=self.method.gate_rate * self._share(optimizer))
            self.grad = None
            self.done += 1
            self._set_hardness()
        self.frozen.restore()
        self.method.clamp_gates()

    def _share(self, optimizer: Optimizer) -> float:
        """Return the learning rate as a share of its largest value so far: the gates' rate follows a schedule."""
        rates = [group.get("lr", 1.0) for group in optimizer.param_groups]
        rate = max(1.0 if given is None else float(given) for given in rates)  # None: an optimizer that finds its own
        peak = self.peaks[id(optimizer)] = max(rate, self.peaks.get(id(optimizer), 0.0))
        return rate / peak if peak > 0 else 1.0

    def settle(self, loader: Iterable[Any]) -> None:
        """Recompute the running statistics of norms with the final gates. The backbone must be in evaluation mode."""
        self.method.norms.recompute_over(self.method, self.number, inputs(loader, self.module.embedding.device))

    def finish(self) -> None:
        """Make the gates and norms of the task final."""
        norms, trunk = self.method.norms, self.method.net.trunk
        own = [attrgetter(name)(trunk) for name, learnt in zip(norms.names, norms.learnt, strict=True) if not learnt]
        parallel.agree(self.group, [*own, *(buffer for module in self.own for buffer in module.buffers())])
        self.method.finish_task(self.number)
        norms.take_back(self.method.net)
        for tensor in norms.of(self.number).values():
            tensor.requires_grad_(False)
        self.close()

    def close(self) -> None:
        """Remove the hooks, and leave the embedding to the next task."""
        for hook in self.hooks:
            hook.remove()
        self.hooks, self.grad = [], None
        self.module.close()
        if isinstance(self.method, HAT):
            self.method.embeddings[self.number] = nn.Parameter(self.module.embedding.detach().clone())
        self.method.end_learning()
        self.method.norms.lent = None


def gate_count(method: Gated) -> int:
    """Return how many gates a method has: one per unit, or one per weight."""
    return method.units.count if isinstance(method, HAT) else method.count


def _maximizes(optimizer: Optimizer, trunk: nn.Module, embedding: nn.Parameter) -> bool:
    """Return whether an optimizer maximises the loss by the weights of a backbone; raise if it also minimises it by some."""
    if not any(group.get("maximize", False) for group in optimizer.param_groups):
        return False
    own = {id(p) for p in trunk.parameters() if p is not embedding}  # its group may be that of a head
    groups = [group for group in optimizer.param_groups if any(id(p) in own for p in group["params"])]
    found = {bool(group.get("maximize", False)) for group in groups}
    if len(found) > 1:
        raise ValueError(
            f"{type(optimizer).__name__} has maximize=True for some weights of the backbone and False for others, so that "
            "the gates have no direction: choose one for all groups that hold weights of the backbone"
        )
    return found == {True}


def _mask_on_arrival(freeze: Freeze, parameter: Tensor) -> None:
    check_dense(freeze)
    freeze.mask_grad()


@contextmanager
def _all_require_gradients(method: Gated) -> Iterator[None]:
    """Within the block all weights that can be trained require gradients: what the user stops for a while is frozen, too."""
    stopped = [p for name, p in method.net.trunk.named_parameters() if not p.requires_grad and name not in method.built[1]]
    for parameter in stopped:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in stopped:
            parameter.requires_grad_(False)
