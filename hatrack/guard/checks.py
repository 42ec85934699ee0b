"""Checks of what is given to a guard: each error is one line that names the value and what was expected."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer

from hatrack.guard.backbone import is_protected
from hatrack.guard.finished import Finished
from hatrack.options import expect, shown, whole
from hatrack.tracing.wrappers import check_modules

SHARDED = ("DTensor", "FlatParameter", "ShardedTensor")


def check_backbone(backbone: Any) -> None:
    """Raise an error unless a module can be protected."""
    expect("the backbone", backbone, nn.Module, "a module such as nn.Sequential(...)")
    check_modules(backbone)
    if is_protected(backbone):
        raise ValueError("the backbone is protected already, or a part of it is: guard.remove() ends that")
    if not any(p.requires_grad for p in backbone.parameters()):
        raise ValueError(f"the backbone ({type(backbone).__name__}) has no parameter that requires a gradient")
    check_plain(backbone)


def check_plain(module: nn.Module, what: str = "the backbone") -> None:
    """Raise an error that names the first parameter of a module that is sharded, or not initialised yet."""
    for name, parameter in module.named_parameters():
        kinds = {kind.__name__ for kind in (*type(parameter).__mro__, *type(parameter.data).__mro__)}
        if sharded := kinds.intersection(SHARDED):
            raise ValueError(
                f"the parameter {name!r} is sharded ({sharded.pop()}), so that no process has all its bits: protect takes "
                "DistributedDataParallel, which keeps them whole"
            )
        if is_lazy(parameter):
            raise ValueError(f"the parameter {name!r} of {what} has no shape yet: run {what} on an input before")
        if parameter.is_inference():
            raise ValueError(f"the parameter {name!r} of {what} can't learn: it was made within torch.inference_mode")


def check_example(example: Any) -> Tensor:
    """Return the example; raise an error unless it is a tensor of inputs as the backbone takes them."""
    if not isinstance(example, Tensor) or not example.dim() or not example.numel():
        raise ValueError(f"the example must be a tensor of one or more inputs, such as x[:2], not {shown(example)}")
    if example.dtype is torch.uint8:
        raise ValueError("the example must be what the backbone takes, floats or token ids (int64), not uint8")
    return example.detach()


def bare_optimizers(optimizer: Any) -> list[Optimizer]:
    """Return the optimizers, without wrappers that have an optimizer as `.optimizer`; raise an error for other things."""
    given = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    if not given:
        raise ValueError("protect needs an optimizer, or a list of them, not an empty list")
    found = [bare_optimizer(one) for one in given]
    if len({id(one) for one in found}) < len(found):
        raise ValueError(f"the list of optimizers has one ({type(found[0]).__name__}) twice")
    return found


def bare_optimizer(optimizer: Any) -> Optimizer:
    """Return an optimizer without wrappers; raise an error unless hooks can be put around its steps."""
    found = optimizer
    while isinstance(inner := getattr(found, "optimizer", None), Optimizer):
        found = inner
    if not isinstance(found, Optimizer):
        raise ValueError(
            f"the optimizer must be one of torch.optim, such as AdamW(...), or a list of them, not {shown(found)}"
        )
    if isinstance(found, LBFGS):
        raise ValueError("LBFGS moves weights several times within one step, so that it can't be guarded: take SGD or AdamW")
    return found


def held_by(optimizer: Optimizer) -> set[int]:
    """Return the `id` of every parameter that an optimizer holds."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def check_held(backbone: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raise an error unless the optimizers hold parameters of the backbone."""
    held = set[int]().union(*map(held_by, optimizers))
    if not any(id(p) in held for p in backbone.parameters()):
        raise ValueError(
            f"the optimizer ({type(optimizers[0]).__name__}) holds no parameter of the backbone "
            f"({type(backbone).__name__}): make it of backbone.parameters()"
        )


def check_learn(backbone: nn.Module, tasks: Mapping[str, Finished], name: Any, steps: Any, own: Any) -> list[nn.Module]:
    """Return the modules of a new task as a list; raise an error unless the task can be learned."""
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"the name of a task must be a text, not {shown(name)}")
    if name in tasks:
        raise ValueError(f"the task {name!r} has been learned: guard.release({name!r}) gives it up, or choose another name")
    if whole("steps", steps) < 1:
        raise ValueError(f"steps must be at least 1, the number of optimizer steps in an epoch, not {steps}")
    modules = check_own(own)
    check_plain(backbone)
    _check_apart(backbone, tasks, modules)
    return modules


def check_own(own: Any) -> list[nn.Module]:
    """Return the modules of a task as a list; raise an error unless they are modules with values."""
    modules = [own] if isinstance(own, nn.Module) and not isinstance(own, nn.ModuleList) else own
    if not isinstance(modules, Collection | nn.ModuleList) or not all(isinstance(m, nn.Module) for m in modules):
        raise ValueError(f"own must be a list of modules, such as [head], not {shown(own)}")
    for module in modules:
        check_plain(module, f"the module in own ({type(module).__name__})")
    return list(modules)


def check_kind(embedding: nn.Parameter) -> None:
    """Raise an error if the backbone, and with it the embedding, was cast to another type of number."""
    if embedding.dtype is not torch.float32:
        kind = str(embedding.dtype).removeprefix("torch.")
        raise ValueError(f"the backbone was cast to {kind} after it was protected: cast it before hr.protect")


def _check_apart(backbone: nn.Module, tasks: Mapping[str, Finished], own: Sequence[nn.Module]) -> None:
    """Raise an error if a module of a new task has a tensor of the backbone, or one that is sealed."""
    shared = {id(t) for t in (*backbone.parameters(), *backbone.buffers())}
    sealed = {
        id(t): name
        for name, task in tasks.items()
        for module in task.sealed.modules
        for t in (*module.parameters(), *module.buffers())
    }
    for module in own:
        for tensor in (*module.parameters(), *module.buffers()):
            if id(tensor) in shared:
                raise ValueError(f"own: {type(module).__name__} has tensors of the backbone, which all tasks share")
            if id(tensor) in sealed:
                raise ValueError(
                    f"own: {type(module).__name__} belongs to the task {sealed[id(tensor)]!r}, for which it is sealed: give "
                    "every task a module of its own"
                )
