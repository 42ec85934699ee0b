"""State that no state_dict holds: tensors and numbers that a module keeps as plain attributes, and buffers of no file.

A trunk may keep an average as `self.mean = 0.9 * self.mean + ...`. Nothing that reads `state_dict()` sees it, but a task
that could not be learned has to be rolled back there, too.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

TORCH = frozenset(vars(nn.Module()))  # the attributes that every module has: tables of parameters, hooks, the mode
PACKAGE = __name__.partition(".")[0]  # its own modules keep nothing that depends on images
PLAIN = (int, float, bool, str, bytes, complex, type(None))


class Kept(NamedTuple):
    """A value as it was: the object, and a copy of what was in it."""

    value: Any
    copy: Any


class HiddenState:
    """The hidden state of all modules within a module, as it is now. Modules of this package have none.

    Args:
        module: the module.
        buffers: also keep the values of all buffers, not only of those that `state_dict()` leaves out.
    """

    def __init__(self, module: nn.Module, *, buffers: bool = False) -> None:
        state = {id(t) for t in module.state_dict(keep_vars=True).values()}
        known = {id(t) for t in (*module.parameters(), *module.buffers())}
        self.buffers = [(b, b.detach().clone()) for b in module.buffers() if buffers or id(b) not in state]
        inner = [part for part in module.modules() if part is not module]
        users = [part for part in inner if type(part).__module__.partition(".")[0] != PACKAGE]
        self.attributes = [(part, set(vars(part)), _attributes(part, known)) for part in users]

    def __enter__(self) -> None:
        """Begin a block at whose end everything is restored."""

    def __exit__(self, *error: object) -> None:
        self.restore()

    @torch.no_grad()
    def restore(self) -> None:
        """Give the modules back what they had. No version of a tensor changes, so that a backward pass is still possible."""
        for buffer, value in self.buffers:
            if buffer.shape == value.shape:
                buffer.data.copy_(value)
        for module, names, attributes in self.attributes:
            for name in set(vars(module)) - names:
                del vars(module)[name]
            for name, kept in attributes.items():
                vars(module)[name] = _put_back(kept)


def _attributes(module: nn.Module, known: set[int]) -> dict[str, Kept]:
    """Return the plain attributes of one module, without those that hold something else than tensors and numbers."""
    own = {name: value for name, value in vars(module).items() if name not in TORCH}
    return {name: Kept(value, _copied(value)) for name, value in own.items() if _keepable(value, known)}


def _keepable(value: Any, known: set[int]) -> bool:
    """Return whether a value is a tensor of its own, a number or text, or a list, tuple, set or dictionary of such."""
    if isinstance(value, Tensor):
        return id(value) not in known
    if isinstance(value, dict):
        return all(_keepable(v, known) for v in value.values())
    if isinstance(value, (list, tuple, set)):
        return all(_keepable(v, known) for v in value)
    return isinstance(value, PLAIN)


def _copied(value: Any) -> Any:
    """Return a copy of a value; of tensors and containers also what they are copies of."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: Kept(v, _copied(v)) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [Kept(v, _copied(v)) for v in value]
    return set(value) if isinstance(value, set) else value


def _put_back(kept: Kept) -> Any:
    """Return the object that was kept, with what was in it."""
    value, copy = kept
    if isinstance(value, Tensor):
        if value.shape == copy.shape:
            value.data.copy_(copy)
            return value
        return copy
    if isinstance(value, dict):
        items = {key: _put_back(v) for key, v in copy.items()}
        value.clear()
        value.update(items)
    elif isinstance(value, list):
        value[:] = [_put_back(v) for v in copy]
    elif isinstance(value, tuple):
        for v in copy:
            _put_back(v)
    elif isinstance(value, set):
        value.clear()
        value.update(copy)
    return value
