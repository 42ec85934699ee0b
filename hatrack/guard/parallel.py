"""Several processes that train one backbone by DistributedDataParallel: all of them must end with the same bits."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel


def group_of(embedding: nn.Parameter) -> Any:
    """Return the group of processes if DistributedDataParallel runs the forward pass under way; None otherwise."""
    active = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if active is None:
        return None
    if not any(parameter is embedding for parameter in active._module_parameters):
        raise ValueError("protect the backbone before DistributedDataParallel wraps it: the gates are among its parameters")
    return active.process_group


def mean(tensor: Tensor, group: Any) -> Tensor:
    """Return the mean of a tensor over the processes of a group; the tensor itself without one."""
    if group is None:
        return tensor
    total = tensor.clone()
    distributed.all_reduce(total, group=group)
    return total / distributed.get_world_size(group)


@torch.no_grad()
def agree(group: Any, buffers: Sequence[Tensor]) -> None:
    """Give buffers the same values in all processes of a group: their mean, or the first process's if they are integers."""
    for buffer in buffers if group is not None else ():
        if buffer.is_floating_point():
            buffer.copy_(mean(buffer, group))
        else:
            distributed.broadcast(buffer, group=group, group_src=0)
