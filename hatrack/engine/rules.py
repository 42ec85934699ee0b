"""The rule of the step, checked on any machine, so that a computer without a GPU guards the GPU's recorded steps.

Inside a step, Python may depend on the task but never on a tensor's value; no tensor is made from Python data; random
numbers come from torch's generators, which nobody sets; and nothing is rebound: parameters, buffers and plain attributes are
afterwards the same objects at the same addresses.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hatrack.engine.optimizers import Optimizer

aten = torch.ops.aten
READS = {  # operations that wait for a value, or whose result's shape depends on values
    aten._local_scalar_dense.default: "reads a tensor's value (if, bool(), int(), float() or .item() on a tensor)",
    aten.nonzero.default: "has a result whose shape depends on values (nonzero, or a mask as an index)",
    aten.masked_select.default: "has a result whose shape depends on values (masked_select)",
    aten.equal.default: "reads a tensor's value (torch.equal)",
    aten._unique2.default: "has a result whose shape depends on values (unique)",
    aten.unique_dim.default: "has a result whose shape depends on values (unique)",
    aten.unique_consecutive.default: "has a result whose shape depends on values (unique_consecutive)",
    aten.bincount.default: "has a result whose shape depends on values (bincount)",
    aten.repeat_interleave.Tensor: "has a result whose shape depends on values (repeat_interleave by a tensor)",
    aten.allclose.default: "reads a tensor's value (torch.allclose)",
    aten.lift_fresh.default: "makes a tensor from Python data (torch.tensor, torch.as_tensor)",
}
LEAVES_TORCH = {
    Tensor.tolist: "reads tensor values (.tolist())",
    Tensor.numpy: "reads tensor values (.numpy())",
    Tensor.__array__: "reads tensor values (a numpy call on a tensor)",
    Tensor.cpu: "copies from the device to the host (.cpu())",
    torch.frombuffer: "makes a tensor from Python data (torch.frombuffer)",
    torch.from_numpy: "makes a tensor from Python data (torch.from_numpy)",
}
MASKABLE = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default)
PLAIN = (bool, int, float, str, type(None))
MODULE = set(vars(nn.Module()))  # what every module has


class RuleBroken(AssertionError):  # noqa: N818
    """A step did something that a recorded step can't do."""


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn = _generators()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            raise RuleBroken(f"the step {READS[func]}")
        if func in MASKABLE and any(i is not None and i.dtype == torch.bool for i in args[1]):
            raise RuleBroken("the step uses a mask as an index, so that a shape depends on values; use torch.where")
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        self.check()
        result = func(*args, **(kwargs or {}))
        self.drawn = _generators()
        return result

    def check(self) -> None:
        """The generators are as the last draw left them. (Checkpointing of activations sets them back, to draw the same
        dropout a second time.)"""
        if _generators() != self.drawn:
            raise RuleBroken("the step sets a generator, which a recorded step would not do again")


def _generators() -> list[bytes]:
    """The state of torch's generators."""
    with torch._C.DisableTorchFunction():
        states = [torch.default_generator.get_state()]
        states += [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        return [state.numpy().tobytes() for state in states]


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in LEAVES_TORCH:
            raise RuleBroken(f"the step {LEAVES_TORCH[func]}")
        return func(*args, **(kwargs or {}))


def _places(module: nn.Module, optimizers: list[Optimizer]) -> dict[str, tuple[int, int]]:
    """The object and the address behind every name: parameters, buffers and the optimizers' state."""
    found: dict[str, Tensor] = dict([*module.named_parameters(), *module.named_buffers()])
    for k, optimizer in enumerate(optimizers):
        for n, state in enumerate(optimizer.state.values()):
            found |= {f"optimizer {k}, state {n}, {key}": t for key, t in state.items()}
    return {name: (id(t), t.data_ptr()) for name, t in found.items()}


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The plain Python values that a recorded step would never see change, and the identity of everything else."""
    found = {}
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if key not in MODULE - {"training"}:
                found[f"{name}.{key}".lstrip(".")] = _content(value)
    return found


def _content(value: Any) -> Any:
    """Plain values as they are, those in lists, dictionaries and objects too; of anything else, which object it is."""
    if isinstance(value, list | tuple):
        return [_content(v) for v in value]
    if isinstance(value, dict):
        return {key: _content(v) for key, v in value.items()}
    if isinstance(value, Tensor):
        return id(value), value.data_ptr()
    if isinstance(value, PLAIN):
        return value
    return id(value), {key: v for key, v in getattr(value, "__dict__", {}).items() if isinstance(v, PLAIN)}


@contextmanager
def _no_other_randomness() -> Iterator[None]:
    """What is drawn by Python or numpy would be drawn only once; their generators are set back, whatever happens."""
    own, theirs = random.getstate(), np.random.get_state(legacy=False)
    try:
        yield
        now = np.random.get_state(legacy=False)["state"]
        moved = random.getstate() != own or not all(np.array_equal(now[key], theirs["state"][key]) for key in now)
    finally:
        random.setstate(own)
        np.random.set_state(theirs)
    if moved:
        raise RuleBroken("the step draws random numbers from Python or numpy, which a recorded step would not do again")


@contextmanager
def watch_step(module: nn.Module, optimizers: list[Optimizer] | None = None) -> Iterator[None]:
    """Raise `RuleBroken` if what runs within breaks the rule of the step."""
    places, attributes = _places(module, optimizers or []), _attributes(module)
    operations = _Operations()
    with _no_other_randomness(), _Functions(), operations:
        yield
    operations.check()
    for what, before, now in (
        ("address of", places, _places(module, optimizers or [])),
        ("attribute", attributes, _attributes(module)),
    ):
        for name in before.keys() | now.keys():
            if before.get(name) != now.get(name):
                raise RuleBroken(f"the step rebinds something: the {what} {name} is not what it was")


def watched(step: Callable[..., Tensor], module: nn.Module, optimizers: list[Optimizer]) -> Callable[..., Tensor]:
    """The same step, checked at every call but the first, in which optimizers make their state."""
    calls = 0

    def checked(*inputs: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 1:
            return step(*inputs)
        with watch_step(module, optimizers):
            return step(*inputs)

    return checked
