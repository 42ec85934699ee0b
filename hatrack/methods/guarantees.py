"""What is guaranteed of finished tasks: what they use keeps its bits, and they answer as they did.

`Method.used_by` names what a task uses: weights, gates, norms, head. A saved method has digests of that, which are compared
after every new task, before a save and after loading. But a trunk may use more than a method can see. So finished tasks are
also given some images, the probes, before a new task is learned, and again afterwards.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hatrack.files import tensors
from hatrack.seeds import seeded
from hatrack.tasks.task import Task

if TYPE_CHECKING:
    from hatrack.methods.method import Method

ROUNDING = 1e-4  # of logits, as a share of the largest of them: what another order of sums makes of them
PROBES = 16  # images of a new task that finished tasks are given


@contextmanager
def transaction(method: "Method", task: Task) -> Iterator[None]:
    """Within it a task is learned. Afterwards the guarantees are verified; if they don't hold, or if anything failed, the
    method's state is rolled back to what it was before."""
    before = {key: value.clone() for key, value in method.state_dict().items()}
    method.probes = take_probes(method, task)
    try:
        try:
            yield
        finally:
            method.end_learning()
        check_digests(method, but=task.index)
        method.probes.check(method)
    except BaseException:
        roll_back(method, before)
        raise
    finally:
        method.probes = None


@torch.no_grad()
def roll_back(method: "Method", before: dict[str, Tensor]) -> None:
    """Give the method an earlier state; what it grew by since then stays as it is."""
    for key, value in method.state_dict().items():
        if key in before and before[key].shape == value.shape:
            value.copy_(before[key])


@torch.no_grad()
def digest(method: "Method", task: int) -> str:
    """A digest of all that a finished task uses, its preprocessing included; empty if the method guarantees nothing."""
    used = method.used_by(task)
    rows = {f"view {name}": row for name, row in method.net.preprocessing.rows(task).items()}
    return tensors.digest({**used, **rows}) if used else ""


def check_digests(method: "Method", *, but: int | None = None) -> None:
    """Raise an error that names the task if one is not, bit for bit, what it was when the method was saved or loaded."""
    for task, saved in method.digests.items():
        if task != but and digest(method, task) != saved:
            raise ValueError(
                f"task {task} ({method.history[task]!r}) is not what it was: weights, gates, norms or a head that it uses "
                "have changed since the method was saved or loaded"
            )


@torch.no_grad()
def logits(method: "Method", task: int, images: Tensor | None = None) -> Tensor:
    """The logits of a task on the network's example, or on other images, in evaluation mode."""
    mode = method.training
    given = method.net.example if images is None else images
    with seeded(0, "logits"), torch.autocast(given.device.type, enabled=False):
        found: Tensor = method.eval()(given, task)
    method.train(mode)
    return found.cpu()


class Probes(NamedTuple):
    """What finished tasks answered to some images."""

    images: Tensor
    logits: dict[int, Tensor]  # by task

    @torch.no_grad()
    def check(self, method: "Method") -> None:
        """Raise an error if a task answers differently now, by more than another order of sums makes of it."""
        for task, then in self.logits.items():
            if not close(then, logits(method, task, self.images), ROUNDING):
                raise ValueError(
                    f"task {task} ({method.history[task]!r}) would no longer answer as it did: the trunk uses something "
                    "that the method can't see, perhaps a tensor that is no parameter or buffer, a parameter in a list, a "
                    "module in a closure. The state was rolled back"
                )


def take_probes(method: "Method", new: Task) -> Probes:
    """Give a few images of a new task to the finished tasks that must not change. Tasks whose answers are random are left
    out: they tell nothing."""
    held = [task for task in method.history if task != new.index and method.used_by(task)]
    if not held or new.shape != method.net.example.shape[1:]:
        return Probes(method.net.example, {})
    some = new.train.inputs(torch.arange(min(PROBES, len(new.train)), device=new.train.y.device))
    images = torch.cat([method.net.example, some.to(method.net.example)])
    once, twice = ({task: logits(method, task, images) for task in held} for _ in range(2))
    return Probes(images, {task: once[task] for task in held if close(once[task], twice[task], ROUNDING)})


def close(then: Tensor, now: Tensor, share: float) -> bool:
    """Whether logits differ by no more than this share of the largest."""
    room = share * max(1.0, then.abs().max().item()) if then.numel() else 0.0
    return then.shape == now.shape and torch.allclose(now, then.to(now), rtol=0, atol=room, equal_nan=True)
