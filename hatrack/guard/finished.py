"""A finished task of a guard: what shows that it is, bit for bit, what it was."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hatrack.files import tensors as tensor_files
from hatrack.guard.lesson import Gated
from hatrack.guard.sealing import Sealed
from hatrack.methods.guarantees import close, logits

TOLERANCE = 1e-2  # of answers, as a share of the largest: the device and the build of torch decide the last bits


@dataclass
class Finished:
    """A finished task.

    Attributes:
        number: its number in the method.
        sealed: the modules that only this task has.
        digest: of all bits that the task uses.
        answers: the features of the example, in evaluation mode.
    """

    number: int
    sealed: Sealed
    digest: str
    answers: Tensor

    def check(self, method: Gated, name: str) -> None:
        """Raise an error that names the task if it has changed. The backbone must be bare."""
        if digest(method, self.number, self.sealed.now()) != self.digest:
            raise ValueError(
                f"task {name!r} is not what it was: weights, gates, norms or modules of its own were changed outside of the "
                "guard, perhaps by another optimizer or load_state_dict; the last file that was saved has it"
            )
        if not close(self.answers, logits(method, self.number), TOLERANCE):
            raise ValueError(
                f"task {name!r} answers differently although its weights are the same: does the backbone compute the same?"
            )


@torch.no_grad()
def digest(method: Gated, number: int, own: Mapping[str, Tensor]) -> str:
    """Return a digest of all that a task uses: weights between its units, gates, norms, modules of its own."""
    return tensor_files.digest({**method.used_by(number), **{f"own {name}": tensor for name, tensor in own.items()}})


@torch.no_grad()
def check_finite(method: Gated, number: int, own: Mapping[str, Tensor], name: str) -> None:
    """Raise an error that names the tensor if a task uses a value that is not finite."""
    used = {key.removeprefix("trunk."): tensor for key, tensor in method.used_by(number).items()}
    for key, tensor in {**used, **own}.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ValueError(f"task {name!r} ended with values in {key} that are not finite; the state was rolled back")
