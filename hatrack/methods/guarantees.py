"""Verify the guarantees for finished tasks: everything that they use keeps its bits, and their logits stay the same.

`Method.used_by` returns what a task uses: weights, gates, norms, head. Digests of these tensors are taken before a new task
is learned and compared afterwards, on a GPU as fingerprints; those of a saved method also before saving and after loading.
But a trunk may use tensors that a method does not know. So the logits of finished tasks on some images, the probes, are also
compared before and after a new task is learned: on the network's example, on images of the new task, and on stored images of
the finished task itself, if the method keeps any.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hatrack.files import tensors
from hatrack.methods.fit import CountedFit
from hatrack.methods.hidden_state import HiddenState
from hatrack.methods.modes import evaluation_mode
from hatrack.methods.parts.fingerprint import fingerprint
from hatrack.seeds import seeded
from hatrack.tasks.task import Task

if TYPE_CHECKING:
    from hatrack.methods.method import Method

ROUNDING = (
    1e-4  # the difference of logits that is allowed, as a share of the largest: sums in another order round differently
)
FINGERPRINTED = ("cuda",)  # devices whose tensors need not come to the host to be compared
QUICK = "fingerprint "  # the beginning of a digest that is one
PROBES = 16  # images of the new task among the probes
BATCH = 512  # images in one forward pass


@contextmanager
def transaction(method: "Method", task: Task, fit: CountedFit) -> Iterator[None]:
    """Learn a task in the block, then verify the guarantees. If they are broken, or if anything fails, the state of the
    method, and what the fit carries over from task to task, is rolled back to what it was before the block."""
    before, hidden = {key: value.clone() for key, value in method.state_dict().items()}, HiddenState(method)
    mode, cancel = method.training, fit.begin(method)
    known = _known_digests(method)
    method.probes = take_probes(method, task, known)
    bits = take_digests(method, task, known)
    try:
        try:
            yield
        finally:
            method.end_learning()
        check_digests(method, bits)
        method.probes.check(method)
        method.bits = Bits(bits, _versions(method))
    except BaseException as error:
        roll_back(method, before)
        hidden.restore()
        cancel()
        method.train(mode)
        if changed := _still_changed(method, method.probes):
            raise ValueError(
                f"{_named(method, changed[0])} answers differently although the state was rolled back: the trunk keeps "
                "state outside its modules, in a closure or a global; load the method from the last file that was saved"
            ) from error
        raise
    finally:
        method.probes = None


def _still_changed(method: "Method", probes: "Probes") -> list[int]:
    """Return the tasks that answer differently after the state was rolled back; none if they fail, as without memory:
    then the error that came first says more."""
    try:
        return probes.changed(method)
    except Exception:
        return []


@torch.no_grad()
def roll_back(method: "Method", before: dict[str, Tensor]) -> None:
    """Give the method an earlier state. Tensors that it has gained since then are left as they are."""
    for key, value in method.state_dict().items():
        if key in before and before[key].shape == value.shape:
            value.copy_(before[key])


@torch.no_grad()
def digest(method: "Method", task: int, *, quick: bool = False) -> str:
    """Return a digest of all that a finished task uses, with its preprocessing; empty if the method guarantees nothing.

    Args:
        method: the method.
        task: the number of the task.
        quick: for comparisons in this process: on a GPU a fingerprint, which is computed there.
    """
    used = method.used_by(task)
    if not used:
        return ""
    used = {**used, **{f"view {name}": row for name, row in method.net.preprocessing.rows(task).items()}}
    if quick and any(tensor.device.type in FINGERPRINTED for tensor in used.values()):
        return f"{QUICK}{fingerprint(used)}"
    return tensors.digest(used)


class Bits(NamedTuple):
    """Digests of finished tasks at the end of a task, and the versions of all tensors then: as long as these are the same,
    the digests need not be computed again."""

    digests: Mapping[int, str]
    versions: Mapping[str, tuple[int, int]]


def _known_digests(method: "Method") -> dict[int, str]:
    """Return the digests that need not be computed: of when the method was saved or loaded, or of when the last task was
    learned, if nothing was written since then."""
    same = method.bits is not None and method.bits.versions == _versions(method)
    return {**(method.bits.digests if method.bits and same else {}), **method.digests}


def take_digests(method: "Method", new: Task, known: Mapping[int, str]) -> dict[int, str]:
    """Return the digests of the finished tasks that must not change: those that are known, and of the others as of now."""
    found = {task: known.get(task) or digest(method, task, quick=True) for task in method.history if task != new.index}
    return {task: bits for task, bits in found.items() if bits}


def _versions(method: "Method") -> dict[str, tuple[int, int]]:
    """Return where each tensor lies and how often it was written in place; a write through `data` is not counted."""
    tensors = method.state_dict(keep_vars=True).items()
    return {name: (t.data_ptr(), -1 if t.is_inference() else t._version) for name, t in tensors}


def check_digests(method: "Method", then: Mapping[int, str] | None = None) -> None:
    """Raise an error that names the task if one has changed by a bit.

    Args:
        method: the method.
        then: the digests of tasks, as they were; None: those of when the method was saved or loaded.
    """
    for task, bits in (method.digests if then is None else then).items():
        if digest(method, task, quick=bits.startswith(QUICK)) != bits:
            since = "the method was saved or loaded" if method.digests.get(task) == bits else "they were last compared"
            raise ValueError(
                f"task {task} ({method.history[task]!r}) is not what it was: weights, gates, norms or a head that it uses "
                f"have changed since {since}"
            )


@torch.no_grad()
def logits(method: "Method", task: int, images: Tensor | None = None) -> Tensor:
    """Return the logits of a task in evaluation mode, on the network's example images or on others."""
    given = method.net.example if images is None else images
    with seeded(0, "logits"), torch.autocast(given.device.type, enabled=False), evaluation_mode(method):
        return method(given, task).cpu()


class Probes(NamedTuple):
    """The logits of finished tasks on some images, before a new task is learned."""

    images: dict[int, Tensor]  # by task
    logits: dict[int, Tensor]

    @torch.no_grad()
    def check(self, method: "Method") -> None:
        """Raise an error if the logits of a task differ now by more than rounding."""
        if changed := self.changed(method):
            raise ValueError(
                f"{_named(method, changed[0])} would no longer answer as it did: the trunk uses something that the method "
                "can't see, perhaps a tensor that is no parameter or buffer, a parameter in a list, a module in a closure. "
                "The state was rolled back"
            )

    @torch.no_grad()
    def changed(self, method: "Method") -> list[int]:
        """Return the tasks whose logits differ now by more than rounding."""
        now = {task: _answers(method, task, self.images[task]) for task in self.logits}
        return [task for task, then in self.logits.items() if not close(then, now[task], ROUNDING)]


def _answers(method: "Method", task: int, images: Tensor) -> Tensor:
    """Return the logits of a task on images, in batches."""
    return torch.cat([logits(method, task, part) for part in torch.split(images, BATCH)])


def _named(method: "Method", task: int) -> str:
    return f"task {task} ({method.history[task]!r})"


def take_probes(method: "Method", new: Task, known: Mapping[int, str] | None = None) -> Probes:
    """Compute the probes of the finished tasks that must not change: on the example images, on some of the new task, and on
    those of the finished task that were stored.

    Args:
        method: the method.
        new: the task that is to be learned.
        known: digests of finished tasks: what has one is guaranteed, and need not be asked for.
    """
    others = [task for task in method.history if task != new.index]
    guaranteed = [task for task in others if (known or {}).get(task) or method.used_by(task)]
    if not guaranteed or new.shape != method.net.example.shape[1:]:
        return Probes({}, {})
    some = new.train.inputs(torch.arange(min(PROBES, len(new.train)), device=new.train.y.device))
    common = [method.net.example, some.to(method.net.example)]
    images = {
        task: torch.cat([*common, *([method.stored_images.of(task)] if method.stored_images else [])]) for task in guaranteed
    }
    return probes_on(method, images)


def probes_on(method: "Method", images: dict[int, Tensor]) -> Probes:
    """Compute the probes of tasks on given images. Tasks whose logits are random are left out."""
    once, twice = ({task: _answers(method, task, given) for task, given in images.items()} for _ in range(2))
    return Probes(images, {task: once[task] for task in images if close(once[task], twice[task], ROUNDING)})


def close(then: Tensor, now: Tensor, share: float) -> bool:
    """Return whether logits differ by at most this share of the largest."""
    tolerance = share * max(1.0, then.abs().max().item()) if then.numel() else 0.0
    return then.shape == now.shape and torch.allclose(now, then.to(now), rtol=0, atol=tolerance, equal_nan=True)
