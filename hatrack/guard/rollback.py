"""The state of everything that a block of learning may change: it is restored if the block fails."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hatrack.guard.sealing import tensors_of
from hatrack.methods.guarantees import roll_back
from hatrack.methods.hidden_state import HiddenState
from hatrack.methods.method import Method


class OptimizerState:
    """The state and the options of an optimizer as they are now."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.state = {p: {key: _copied(value) for key, value in own.items()} for p, own in optimizer.state.items()}
        self.groups = [{key: _copied(value) for key, value in group.items()} for group in optimizer.param_groups]

    @torch.no_grad()
    def restore(self) -> None:
        """Give the optimizer its state back. Groups that were added since are removed."""
        self.optimizer.state.clear()
        self.optimizer.state.update({p: {key: _copied(v) for key, v in own.items()} for p, own in self.state.items()})
        del self.optimizer.param_groups[len(self.groups) :]
        for group, saved in zip(self.optimizer.param_groups, self.groups, strict=True):
            for key in group.keys() - saved.keys():
                del group[key]
            for key, value in saved.items():
                old = group.get(key)
                if isinstance(old, Tensor) and isinstance(value, Tensor) and old.shape == value.shape:
                    old.copy_(value)  # a scheduler may hold this very tensor
                elif isinstance(old, list) and isinstance(value, list):
                    old[:] = value
                else:
                    group[key] = _copied(value)


def _copied(value: Any) -> Any:
    """Return a copy of a tensor, a list or a dictionary. Parameters in a list stay the same objects."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(v) for key, v in value.items()}
    return list(value) if isinstance(value, list) else value


class Rollback:
    """The state of a method with its backbone, of a task's own modules, and of optimizers with all that they hold.

    Args:
        method: the method; the backbone must be bare.
        own: the modules of the task that will be learned.
        optimizers: the optimizers.
        embedding: the guard's own parameter.
    """

    def __init__(
        self, method: Method, own: Sequence[nn.Module], optimizers: Sequence[Optimizer], embedding: nn.Parameter
    ) -> None:
        self.method, self.embedding = method, embedding
        self.state = {key: value.clone() for key, value in method.state_dict().items()}
        self.hidden = [HiddenState(method), HiddenState(nn.ModuleList(own))]
        parts = [*method.net.trunk.modules(), *(part for module in own for part in module.modules())]
        self.modes = [(part, part.training) for part in parts]
        known = {id(t) for t in (*method.parameters(), *method.buffers(), embedding)}
        self.own = [(t, t.detach().clone()) for t in tensors_of(own).values() if id(t) not in known]
        known |= {id(t) for t, _ in self.own}
        held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        self.others = [(p, p.detach().clone()) for p in held if id(p) not in known]
        self.grads = [*method.parameters(), *held, *(t for t, _ in self.own)]
        self.optimizers = [OptimizerState(optimizer) for optimizer in optimizers]

    @torch.no_grad()
    def restore(self) -> None:
        """Give everything the state that it had, and drop all gradients. The backbone must be bare."""
        roll_back(self.method, self.state)
        for tensor, value in (*self.own, *self.others):
            tensor.data.copy_(value)
        for hidden in self.hidden:
            hidden.restore()
        for part, mode in self.modes:
            part.training = mode
        for optimizer in self.optimizers:
            optimizer.restore()
        for tensor in self.grads:
            tensor.grad = None

    def unprotected(self, sealed: set[int]) -> int:
        """Return how many parameters of the optimizers have changed although neither the backbone nor the task has them.

        Args:
            sealed: the parameters of finished tasks, by `id`.
        """
        return sum(id(p) not in sealed and not torch.equal(p, value) for p, value in self.others)
