"""What is promised of finished tasks: that what they use keeps its bits, and that they answer as they did.

`Method.used_by` names what a task uses: weights, gates, norms, head. Of that a saved method has digests, which are compared
after every new task, before a save and after loading. But a trunk may use more than a method can see, so finished tasks are
also asked about some images before a new one is learned, and again afterwards.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hatrack.files import tensors
from hatrack.seeds import seeded
from hatrack.tasks.task import Task

if TYPE_CHECKING:
    from hatrack.methods.method import Method

ROUNDING = 1e-4  # of logits, as a share of the largest of them: what another order of sums makes of them
PROBES = 16  # images of a new task that the finished ones are asked about


@torch.no_grad()
def digest(method: "Method", task: int) -> str:
    """Of all that a finished task uses, its normalisation included; empty if the method promises nothing."""
    used, net = method.used_by(task), method.net
    view = {name: net.get_buffer(name)[task] for name in ("mean", "std", "pixels", "raw")}
    return tensors.digest({**used, **{f"view {name}": row for name, row in view.items()}}) if used else ""


def check(method: "Method", *, but: int | None = None) -> None:
    """An error that names the task if one is not, bit for bit, what it was when the method was saved or loaded."""
    for task, kept in method.digests.items():
        if task != but and digest(method, task) != kept:
            raise ValueError(
                f"task {task} ({method.history[task]!r}) is not what it was: weights, gates, norms or a head that it uses "
                "have changed since the method was saved or loaded"
            )


@torch.no_grad()
def logits(method: "Method", task: int, images: Tensor | None = None) -> Tensor:
    """On the network's example, or on other images."""
    mode = method.training
    given = method.net.example if images is None else images
    with seeded(0, "logits"), torch.autocast(given.device.type, enabled=False):
        found: Tensor = method.eval()(given, task)
    method.train(mode)
    return found.cpu()


class Answers(NamedTuple):
    """What finished tasks answered to some images."""

    images: Tensor
    logits: dict[int, Tensor]  # by task

    @torch.no_grad()
    def check(self, method: "Method") -> None:
        """An error if a task answers otherwise now, by more than another order of sums makes of it: what a task uses may be
        more than the method knows of."""
        for task, then in self.logits.items():
            if not close(then, logits(method, task, self.images), ROUNDING):
                raise ValueError(
                    f"task {task} ({method.history[task]!r}) would no longer answer as it did: the trunk uses something "
                    "that the method can't see, perhaps a tensor that is no parameter or buffer, a parameter in a list, a "
                    "module in a closure. What was learned just now is undone"
                )


def answers(method: "Method", new: Task) -> Answers:
    """Of the finished tasks that are to stay as they are while a new one is learned, to a few images of that one. Those of a
    trunk that answers by chance say nothing."""
    held = [task for task in method.history if task != new.index and method.used_by(task)]
    if not held or new.shape != method.net.example.shape[1:]:
        return Answers(method.net.example, {})
    some = new.train.inputs(torch.arange(min(PROBES, len(new.train)), device=new.train.y.device))
    images = torch.cat([method.net.example, some.to(method.net.example)])
    once, twice = ({task: logits(method, task, images) for task in held} for _ in range(2))
    return Answers(images, {task: once[task] for task in held if close(once[task], twice[task], ROUNDING)})


def close(then: Tensor, now: Tensor, share: float) -> bool:
    """Do logits differ by no more than this share of the largest?"""
    room = share * max(1.0, then.abs().max().item()) if then.numel() else 0.0
    return then.shape == now.shape and torch.allclose(now, then.to(now), rtol=0, atol=room, equal_nan=True)
