"""Check the rule of the step on any machine, so that tests on a CPU find steps that a GPU could not record.

Inside a step, Python may depend on the task but never on a tensor's value. No tensor is made from Python data. Random
numbers come from torch's generators, whose state nobody sets. Nothing is rebound: after the step, parameters, buffers and
plain attributes are the same objects at the same addresses.
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
READS = {  # operations that wait for a value, or whose result has a shape that depends on values
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
INDEXING = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default)
PLAIN_TYPES = (bool, int, float, str, type(None))
MODULE_ATTRIBUTES = set(vars(nn.Module()))  # those that every module has


class RuleBroken(AssertionError):  # noqa: N818
    """A step did something that a recorded step can't do."""


class _OperationCheck(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises `RuleBroken` for operations that read values or follow a change of a generator's state."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.expected = _generator_states()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            raise RuleBroken(f"the step {READS[func]}")
        if func in INDEXING and any(i is not None and i.dtype == torch.bool for i in args[1]):
            raise RuleBroken("the step uses a mask as an index, so that a shape depends on values; use torch.where")
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        self.check_generators()
        result = func(*args, **(kwargs or {}))
        self.expected = _generator_states()
        return result

    def check_generators(self) -> None:
        """Raise an error unless the generators are as the last draw left them. (Activation checkpointing sets them back, to
        draw the same dropout a second time.)"""
        if _generator_states() != self.expected:
            raise RuleBroken("the step sets a generator, which a recorded step would not do again")


def _generator_states() -> list[bytes]:
    """Return the state of torch's generators."""
    with torch._C.DisableTorchFunction():
        states = [torch.default_generator.get_state()]
        states += [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        return [state.numpy().tobytes() for state in states]


class _FunctionCheck(TorchFunctionMode):
    """Raises `RuleBroken` for functions that leave torch or come from outside it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in LEAVES_TORCH:
            raise RuleBroken(f"the step {LEAVES_TORCH[func]}")
        return func(*args, **(kwargs or {}))


def _addresses(module: nn.Module, optimizers: list[Optimizer]) -> dict[str, tuple[int, int]]:
    """Return, by name, the object and the address of parameters, buffers and the optimizers' state."""
    found: dict[str, Tensor] = dict([*module.named_parameters(), *module.named_buffers()])
    for k, optimizer in enumerate(optimizers):
        for n, state in enumerate(optimizer.state.values()):
            found |= {f"optimizer {k}, state {n}, {key}": t for key, t in state.items()}
    return {name: (id(t), t.data_ptr()) for name, t in found.items()}


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of all modules by name: plain Python values, whose changes a recorded step would not see, and
    the identity of everything else."""
    found = {}
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if key not in MODULE_ATTRIBUTES - {"training"}:
                found[f"{name}.{key}".lstrip(".")] = _content(value)
    return found


def _content(value: Any) -> Any:
    """Return plain values as they are, also those in lists, dictionaries and objects; of anything else its identity."""
    if isinstance(value, list | tuple):
        return [_content(v) for v in value]
    if isinstance(value, dict):
        return {key: _content(v) for key, v in value.items()}
    if isinstance(value, Tensor):
        return id(value), value.data_ptr()
    if isinstance(value, PLAIN_TYPES):
        return value
    return id(value), {key: v for key, v in getattr(value, "__dict__", {}).items() if isinstance(v, PLAIN_TYPES)}


@contextmanager
def _no_other_randomness() -> Iterator[None]:
    """Raise an error if the block draws random numbers from Python or numpy, which a recording would draw only once. The
    state of both generators is restored in any case."""
    of_python, of_numpy = random.getstate(), np.random.get_state(legacy=False)
    try:
        yield
        now = np.random.get_state(legacy=False)["state"]
        same = all(np.array_equal(now[key], of_numpy["state"][key]) for key in now)
        drawn = random.getstate() != of_python or not same
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
    if drawn:
        raise RuleBroken("the step draws random numbers from Python or numpy, which a recorded step would not do again")


@contextmanager
def watch_step(module: nn.Module, optimizers: list[Optimizer] | None = None) -> Iterator[None]:
    """Raise `RuleBroken` if the block breaks the rule of the step.

    Args:
        module: the method whose step it is.
        optimizers: the optimizers that the step uses.
    """
    addresses, attributes = _addresses(module, optimizers or []), _attributes(module)
    operations = _OperationCheck()
    with _no_other_randomness(), _FunctionCheck(), operations:
        yield
    operations.check_generators()
    for what, before, now in (
        ("address of", addresses, _addresses(module, optimizers or [])),
        ("attribute", attributes, _attributes(module)),
    ):
        for name in before.keys() | now.keys():
            if before.get(name) != now.get(name):
                raise RuleBroken(f"the step rebinds something: the {what} {name} is not what it was")


def watched(step: Callable[..., Tensor], module: nn.Module, optimizers: list[Optimizer]) -> Callable[..., Tensor]:
    """Return the same step with a check of the rule at every call but the first, which may still create state."""
    calls = 0

    def checked(*inputs: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 1:
            return step(*inputs)
        with watch_step(module, optimizers):
            return step(*inputs)

    return checked
