"""The training loss of a task as a function of the parameters that tasks share: its value, gradient and Hessian."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hatrack.methods.method import Method
from hatrack.methods.modes import evaluation_mode
from hatrack.tasks.device import split_to_device
from hatrack.tasks.split import Split

BATCH = 500  # images per forward pass


def even_sample(split: Split, most: int) -> Split:
    """Return at most so many examples of a data set, at even distances; 0: all of them."""
    count = min(most or len(split), len(split))
    places = torch.arange(count, device=split.y.device) * len(split) // max(1, count)
    return split.part(places)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return the values of tensors as one vector."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


class TaskLoss:
    """The mean cross-entropy of a method on examples of a task, in evaluation mode: without dropout and augmentation.

    It is a function of the parameters that tasks share (`Network.shared_parameters`), as one vector; what belongs to a
    single task, such as a head of its own or its masks, is part of the function.

    Args:
        method: the method; it is left in the mode that it had.
        split: the examples; they are brought to the device of the method.
    """

    def __init__(self, method: Method, split: Split) -> None:
        self.method = method
        self.split = split_to_device(split, method.net.example.device)
        self.parameters = list(method.net.shared_parameters())

    def weights(self) -> Tensor:
        """Return the present values of the parameters."""
        return flat(self.parameters)

    @torch.no_grad()
    def value(self) -> float:
        """Return the loss."""
        with evaluation_mode(self.method):
            return sum(float(part) for part in self._parts())

    def gradient(self) -> Tensor:
        """Return the gradient of the loss; raise a ValueError if the loss depends on none of the parameters."""
        total = torch.zeros_like(self.weights())
        with self._differentiable():
            for part in self._parts():
                total += self._flat(self._gradients(part))
        return total

    def product(self, vector: Tensor) -> Tensor:
        """Return the product of the Hessian of the loss and a vector, exact but for rounding (Pearlmutter, 1994).

        It is the gradient of the scalar product of the gradient and the vector.
        """
        pieces = torch.split(vector, [p.numel() for p in self.parameters])
        total = torch.zeros_like(vector)
        with self._differentiable():
            for part in self._parts():
                found = self._gradients(part, again=True)
                pairs = [(g, v) for g, v in zip(found, pieces, strict=True) if g is not None and g.requires_grad]
                if pairs:  # else the loss is linear in the parameters
                    along = torch.stack([g.reshape(-1) @ v for g, v in pairs]).sum()
                    total += self._flat(torch.autograd.grad(along, self.parameters, allow_unused=True))
        return total

    @contextmanager
    def _differentiable(self) -> Iterator[None]:
        """Within it the method is in evaluation mode, and attention is computed so that it can be differentiated twice."""
        with evaluation_mode(self.method), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            yield

    def _parts(self) -> Iterator[Tensor]:
        """Yield the loss of every batch, as parts of the mean over all examples."""
        kind = next((p.dtype for p in self.parameters), torch.float32)
        assert isinstance(self.split.task, int)
        divisor = self.split.target.divisor(self.split.y) or 1
        for index in torch.split(torch.arange(len(self.split), device=self.split.y.device), BATCH):
            images = self.split.inputs(index)
            images = images.to(kind) if images.is_floating_point() else images
            logits = self.method(images, self.split.task)
            yield self.split.target.total_loss(logits, self.split.y[index]) / divisor

    def _gradients(self, part: Tensor, *, again: bool = False) -> tuple[Tensor | None, ...]:
        """Return the gradient of a part of the loss; `again` if it is to be differentiated once more."""
        if part.requires_grad and self.parameters:
            found = torch.autograd.grad(part, self.parameters, create_graph=again, allow_unused=True)
            if any(gradient is not None for gradient in found):
                return found
        name = type(self.method).__name__
        raise ValueError(f"{name} has no parameters that its tasks share: there is no loss to look at as a function of them")

    def _flat(self, gradients: tuple[Tensor | None, ...]) -> Tensor:
        """Return gradients as one vector, with zeros for parameters that the loss does not depend on."""
        pairs = zip(gradients, self.parameters, strict=True)
        return flat([torch.zeros_like(p) if gradient is None else gradient for gradient, p in pairs])
