"""A module's state at one moment, kept as buffers, so that it is part of a checkpoint but not of what is trained."""

import torch
from torch import Tensor, nn


class Snapshot(nn.Module):
    """`Snapshot(module)` remembers; `restore(module)` writes the same values into that module, or one like it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for number, value in enumerate(module.state_dict().values()):
            self.register_buffer(str(number), value.clone())

    @torch.no_grad()
    def restore(self, module: nn.Module) -> None:
        kept: list[Tensor] = list(self.buffers())
        for value, old in zip(module.state_dict().values(), kept, strict=True):
            value.copy_(old)
