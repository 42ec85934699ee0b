"""A copy of a module's state, kept as buffers: it is part of checkpoints but is not trained."""

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
