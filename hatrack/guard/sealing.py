"""Modules of one task alone, such as its head: they are sealed when the task is finished, and nothing moves them again."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from hatrack.files import tensors as tensor_files


def tensors_of(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return all parameters and buffers of some modules, by the place of the module and their name in it."""
    return {
        f"{place}.{name}": tensor
        for place, module in enumerate(modules)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }


class Sealed:
    """The modules of a finished task, and the bits that they must keep.

    Args:
        modules: the modules. Their parameters no longer require gradients, so that an optimizer leaves them alone, and they
            are set to evaluation mode, so that no call changes the statistics of a norm.
        values: the values that they must keep, by place and name, if they are not those that they have now. Without
            modules these are all that is known.
    """

    def __init__(self, modules: Sequence[nn.Module], values: Mapping[str, Tensor] | None = None) -> None:
        self.modules = list(modules)
        now = tensors_of(self.modules)
        kept = now if values is None else values
        self.values = {name: value.detach().clone() for name, value in kept.items()}
        self.trained = [p for module in self.modules for p in module.parameters() if p.requires_grad]
        self.modes = [(part, part.training) for module in self.modules for part in module.modules()]
        if self.modules and (wrong := tensor_files.differences(self.values, now)):
            raise ValueError(f"the modules of the task are not like those that were saved: {wrong}")
        self.restore()
        for parameter in self.trained:
            parameter.requires_grad_(False)
            parameter.grad = None

    @torch.no_grad()
    def restore(self) -> None:
        """Give all tensors their bits back, whatever has changed them, and set evaluation mode."""
        for name, tensor in tensors_of(self.modules).items():
            tensor.data.copy_(self.values[name])
        self._evaluate()

    @torch.no_grad()
    def restore_held(self, held: set[int]) -> None:
        """Give the parameters among those that an optimizer holds, by `id`, their bits back."""
        for place, module in enumerate(self.modules):
            for name, parameter in module.named_parameters():
                if id(parameter) in held:
                    parameter.data.copy_(self.values[f"{place}.{name}"])

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Give all buffers their bits back, which a call in training mode may have changed, and set evaluation mode."""
        for place, module in enumerate(self.modules):
            for name, buffer in module.named_buffers():
                buffer.data.copy_(self.values[f"{place}.{name}"])
        self._evaluate()

    def _evaluate(self) -> None:
        for part, _ in self.modes:
            part.training = False

    def now(self) -> dict[str, Tensor]:
        """Return the tensors as they are now, for a digest: those of the modules, or the values if there are no modules."""
        return tensors_of(self.modules) if self.modules else self.values

    def open(self) -> None:
        """Let the modules be trained again, in the modes that they had before."""
        for parameter in self.trained:
            parameter.requires_grad_(True)
        for part, mode in self.modes:
            part.training = mode
