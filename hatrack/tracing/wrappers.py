"""What hides what a trunk computes and is refused: compiled, scripted and replicated modules, and functions that hold it."""

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, jit, nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from hatrack.seeds import seeded

HOLDS = (
    "a function of it, such as a hook or a lambda, refers to the trunk that was copied: use a method, such as self.keep, in "
    "its place"
)


def check_modules(trunk: nn.Module) -> None:
    """Raise an error in one line if a module of the trunk hides its calls or its tensors."""
    for name, module in trunk.named_modules():
        what = f"the trunk's module {name!r}" if name else "the trunk"
        if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
            raise ValueError(
                f"{what} is compiled by torch.compile, which hides its calls: give the module before it is compiled (its "
                "._orig_mod); Trainer(engine='compiled') compiles the steps of training"
            )
        if isinstance(module, jit.ScriptModule):
            raise ValueError(f"{what} is compiled by torch.jit, which hides its calls: give the module that it was made of")
        if isinstance(module, nn.DataParallel | DistributedDataParallel):
            raise ValueError(
                f"{what} is a {type(module).__name__}, whose copies have other tensors: give its .module; a method computes "
                "on one device"
            )


class _Own(TorchFunctionMode):
    """Raises an error if a tensor of a trunk is used while a copy of it runs, which has its own."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.names = {id(t): name for name, t in (*trunk.named_parameters(), *trunk.named_buffers())}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for t in tree_leaves((args, kwargs)):
            if id(t) in self.names:
                raise ValueError(
                    f"a copy of the trunk computes with {self.names[id(t)]!r} of the trunk itself, since {HOLDS}"
                )
        return func(*args, **(kwargs or {}))


def copied(trunk: nn.Module, x: Tensor) -> nn.Module:
    """Return a copy of a trunk in evaluation mode. Raise an error in one line if it can't be run as the trunk can."""
    check_copy(copy.deepcopy(trunk), x)
    return copy.deepcopy(trunk).eval()


def check_copy(twin: nn.Module, x: Tensor, trunk: nn.Module | None = None) -> None:
    """Raise an error in one line if a copy of a trunk can't be run on what the trunk itself was run on.

    Args:
        twin: the copy.
        x: a batch of inputs.
        trunk: the trunk, if it is also an error that the copy computes with its tensors.
    """
    with seeded(0, "check of a copy"), nullcontext() if trunk is None else _Own(trunk):
        try:
            twin.eval()(x)
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError) or "allocate" in str(error) or HOLDS in str(error):
                raise
            said = " ".join(str(error).split())[:200]
            raise ValueError(
                f"a copy of the trunk can't be run ({type(error).__name__}: {said}), probably since {HOLDS}"
            ) from error
