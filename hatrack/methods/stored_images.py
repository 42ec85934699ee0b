"""Stored images of finished tasks, on which their answers are compared before and after a later task (the option `probes`).

Without them the probes are the network's example and images of the new task (`guarantees.py`), and a change that shows only
on a task's own images would not be noticed. The images are as the network sees them and lie in buffers, so that files and
checkpoints hold them. `forget_task` and `release` delete those of a task.
"""

import re
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from hatrack.options import Option
from hatrack.tasks.split import Split

ProbesOption = Annotated[
    int, Option("images of every task to keep, on which its answers are compared after later tasks", low=0, added=True)
]


class StoredImages(nn.Module):
    """A table of images per task.

    Args:
        count: how many images of a task are stored, at most.
        example: images with the shape, type and device of those that will be stored.
    """

    none: Tensor

    def __init__(self, count: int, example: Tensor) -> None:
        super().__init__()
        self.count = count
        self.register_buffer("none", example[:0].detach().clone(), persistent=False)

    def of(self, task: int) -> Tensor:
        """Return the stored images of a task (images, *shape); there may be none."""
        stored = self._buffers.get(_name(task))
        return self.none if stored is None else stored

    def select(self, split: Split) -> Tensor:
        """Return the images of a split to be stored, at even distances, so that sorted data give images of all classes."""
        count = min(self.count, len(split))
        rows = torch.arange(count, device=split.y.device) * len(split) // max(1, count)
        return split.inputs(rows).detach().to(self.none)

    def store(self, task: int, images: Tensor) -> None:
        """Store images of a task in place of those that were stored before."""
        self.delete(task)
        if len(images):
            self.register_buffer(_name(task), images)

    def delete(self, task: int) -> None:
        """Delete the images of a task."""
        self._buffers.pop(_name(task), None)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Tensor],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Take the images of a state_dict in place of those that are here: which tasks have any, only the state tells."""
        for name in [name for name in self._buffers if name != "none"]:
            del self._buffers[name]
        for key, images in state_dict.items():
            name = key.removeprefix(prefix)
            if not key.startswith(prefix):
                continue
            if not re.fullmatch(r"task_\d+", name, re.ASCII):
                unexpected_keys.append(key)
            elif images.shape[1:] != self.none.shape[1:] or images.dtype != self.none.dtype or not len(images) > 0:
                error_msgs.append(f"{key} holds images of shape {tuple(images.shape)}, not (images, *{self.none.shape[1:]})")
            else:
                self.register_buffer(name, images.detach().to(self.none.device, copy=True))


def _name(task: int) -> str:
    return f"task_{task}"


def stored_images(probes: int, example: Tensor) -> StoredImages | None:
    """Return an empty table for so many images of every task; None for 0."""
    return StoredImages(probes, example) if probes else None
