"""The state of everything that a block of learning may change: it is restored if the block fails."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
        self.method, self.embedding, self.gates = method, embedding, embedding.detach().clone()
        self.state = {key: value.clone() for key, value in method.state_dict().items()}
        self.hidden = [HiddenState(method), HiddenState(nn.ModuleList(own))]
        parts = [*method.net.trunk.modules(), *(part for module in own for part in module.modules())]
        self.modes = [(part, part.training) for part in parts]
        self.modules, now = own, tensors_of(own)
        self.own = {name: tensor.detach().clone() for name, tensor in now.items()}
        self.known = {id(t) for t in (*method.parameters(), *method.buffers(), embedding, *now.values())}
        self.others: list[tuple[Tensor, Tensor]] = []  # parameters that optimizers hold besides, and their values
        self.grads: list[Tensor] = [*method.parameters(), *now.values()]
        self.optimizers: list[OptimizerState] = []
        for optimizer in optimizers:
            self.add(optimizer)

    def add(self, optimizer: Optimizer) -> None:
        """Note also the state of an optimizer that is made later, and the parameters that it holds."""
        held = [p for group in optimizer.param_groups for p in group["params"]]
        self.others += [(p, p.detach().clone()) for p in held if id(p) not in self.known]
        self.known |= {id(p) for p in held}
        self.grads += held
        self.optimizers.append(OptimizerState(optimizer))

    @torch.no_grad()
    def restore(self) -> None:
        """Give everything the state that it had, and drop all gradients. The backbone must be bare."""
        now = tensors_of(self.modules)  # a module that is moved to another device has new buffers
        method = dict([*self.method.named_parameters(), *self.method.named_buffers()])
        for tensor, value in (
            *((tensor, self.state[name]) for name, tensor in method.items() if name in self.state),
            *((now[name], value) for name, value in self.own.items()),
            *((self.embedding, self.gates), *self.others),
        ):
            if tensor.dtype != value.dtype:  # it was cast since: 16 bits do not hold what 32 did
                tensor.data = tensor.data.to(value.dtype)
        roll_back(self.method, self.state)
        self.embedding.data.copy_(self.gates)
        for tensor, value in (*((now[name], value) for name, value in self.own.items()), *self.others):
            tensor.data.copy_(value)
        for hidden in self.hidden:
            hidden.restore()
        for part, mode in self.modes:
            part.training = mode
        for optimizer in self.optimizers:
            optimizer.restore()
        for tensor in self.grads:
            tensor.grad = None

    def unprotected(self, guarded: set[int]) -> int:
        """Return how many parameters of the optimizers have changed although neither the backbone nor the task has them.

        Args:
            guarded: the parameters that this guard or another one protects, by `id`.
        """
        return sum(id(p) not in guarded and not torch.equal(p, value.to(p.device)) for p, value in self.others)


@contextmanager
def unchanged_on_failure(modules: Sequence[nn.Module]) -> Iterator[None]:
    """If the block fails, give the tensors of modules their values, and all parts the modes and flags that they had."""
    tensors = [(t, t.detach().clone(), t.requires_grad) for t in tensors_of(modules).values()]
    modes = [(part, part.training) for module in modules for part in module.modules()]
    try:
        yield
    except BaseException:
        for tensor, value, required in tensors:
            tensor.data.copy_(value)
            tensor.requires_grad_(required)
        for part, mode in modes:
            part.training = mode
        raise
