"""Call a module with other tensors in place of its own, as `torch.func.functional_call` does, and leave no trace in it.

nn.LSTM, nn.GRU and nn.RNN have a second list of their weights, which torch brings up to date in the next forward pass only.
Until then it would hold the tensors of the call: they would keep memory, and such a module could not be copied.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
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
        with without_cudnn() if on_gpu else nullcontext():
            return torch.func.functional_call(module, dict(tensors), args)
    finally:
        for part, before in lists:
            vars(part).update(before)
