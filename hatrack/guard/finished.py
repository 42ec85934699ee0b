"""A finished task of a guard: what shows that it is, bit for bit, what it was."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hatrack.files import tensors as tensor_files
from hatrack.guard.sealing import Sealed
from hatrack.guard.soft_gates import Gated
from hatrack.methods.guarantees import close, logits
from hatrack.tracing.exchange import exchanged

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
        """Raise an error that names the task if it has changed. The backbone must be bare.

        Buffers of the task's own modules are restored before: a call outside of a block may have changed statistics.
        """
        self.sealed.restore_buffers()
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
def check_load(method: Gated, tasks: Mapping[str, Finished], state: Mapping[str, Tensor]) -> None:
    """Raise an error that names the task if one would change by loading a state into the backbone, which must be bare."""
    trunk = method.net.trunk
    own = {**dict(trunk.named_parameters()), **dict(trunk.named_buffers())}
    given = {name: value for name, value in state.items() if name in own and own[name].shape == value.shape}
    fits = {name: _in_place_of(own[name], value) for name, value in given.items()}
    with exchanged(trunk, fits):
        for name, task in tasks.items():
            task.sealed.restore()  # the same call may have loaded them a moment ago, if they come before the backbone
            if digest(method, task.number, task.sealed.now()) != task.digest:
                raise ValueError(
                    f"load_state_dict would change weights that the task {name!r} uses: load a state, such as the best of a "
                    f"task, within its block `with guard.learn(name, ...)`; hr.load_guard loads all that was learned"
                )


def _in_place_of(own: Tensor, value: Tensor) -> Tensor:
    """Return a value as a tensor of the backbone would have it: a parameter if that is one, which PMASK asks for."""
    value = value.detach().to(own)
    return nn.Parameter(value, requires_grad=False) if isinstance(own, nn.Parameter) else value


@torch.no_grad()
def check_finite(method: Gated, number: int, own: Mapping[str, Tensor], name: str) -> None:
    """Raise an error that names the tensor if a task uses a value that is not finite."""
    used = {key.removeprefix("trunk."): tensor for key, tensor in method.used_by(number).items()}
    for key, tensor in {**used, **own}.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ValueError(f"task {name!r} ended with values in {key} that are not finite; the state was rolled back")
