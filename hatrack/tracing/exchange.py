"""Call a module with other tensors in place of its own, as `torch.func.functional_call` does, and leave no trace in it.

torch's function does not restore a module that is registered twice. nn.LSTM, nn.GRU and nn.RNN have a second list of their
weights, which torch brings up to date in the next forward pass only. Until then it would hold the tensors of the call: they
would keep memory, and such a module could not be copied.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from hatrack.tracing.cudnn import without_cudnn

LISTS = ("_flat_weights", "_flat_weight_refs")  # of a recurrent module; a forward pass makes them anew and rebinds them


def functional_call(module: nn.Module, tensors: Mapping[str, Tensor], args: tuple[Any, ...]) -> Any:
    """Call a module with some of its parameters and buffers exchanged.

    Args:
        module: the module; afterwards it is as before.
        tensors: the tensors by the names of those that they replace.
        args: the arguments of the call.

    Returns:
        What the module returns.
    """
    lists = [(part, {name: vars(part)[name] for name in LISTS}) for part in module.modules() if isinstance(part, nn.RNNBase)]
    on_gpu = lists and any(tensor.is_cuda for tensor in tensors.values())
    try:
        with exchanged(module, tensors), without_cudnn() if on_gpu else nullcontext():
            return module(*args)
    finally:
        for part, before in lists:
            vars(part).update(before)


@contextmanager
def exchanged(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Put other tensors in the places of some parameters and buffers, wherever the module has them, within the block."""
    own = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}
    if unknown := sorted(tensors.keys() - own.keys()):
        raise KeyError(f"the module has no tensor {unknown[0]!r}")
    new = {id(own[name]): tensor for name, tensor in tensors.items()}
    changed: list[tuple[dict[str, Any], str, Any]] = []
    for part in module.modules():  # each once, also if it is registered twice
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        changed += [(table, name, t) for table in tables for name, t in table.items() if id(t) in new]
    try:
        for table, name, tensor in changed:
            table[name] = new[id(tensor)]
        yield
    finally:
        for table, name, tensor in changed:
            table[name] = tensor


def filled(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of a module with copies of other tensors in place of its own.

    Args:
        module: the module; its own tensors may have no values (device "meta").
        tensors: the tensors by the names of those that they replace; the others are copied as they are.
    """
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    places: dict[int, Any] = {}  # as deepcopy keeps them: what stands for an object, by its id
    for name, tensor in tensors.items():
        value = tensor.detach().clone()
        old = own[name]
        places[id(old)] = nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value
    return copy.deepcopy(module, places)
