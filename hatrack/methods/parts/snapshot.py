"""Copies of a module's state: all of it, kept as buffers (part of checkpoints but not trained), or what a fit may change."""

import torch
from torch import Tensor, nn


class Snapshot(nn.Module):
    """A copy of the state of a module at the time of the call.

    Args:
        module: the module to copy.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for number, value in enumerate(module.state_dict().values()):
            self.register_buffer(str(number), value.clone())

    @torch.no_grad()
    def restore(self, module: nn.Module) -> None:
        """Write the values of the snapshot into the module, or into another one with the same structure."""
        saved: list[Tensor] = list(self.buffers())
        for value, old in zip(module.state_dict().values(), saved, strict=True):
            value.copy_(old)


def copy_trained(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of all tensors of the module's state that a fit may change, by name.

    These are the buffers and the parameters that require gradients; the others, such as the columns of finished tasks in a
    network that grows, would only take time and memory.
    """
    state = module.state_dict(keep_vars=True)
    return {
        name: value.detach().clone()
        for name, value in state.items()
        if value.requires_grad or not isinstance(value, nn.Parameter)
    }
