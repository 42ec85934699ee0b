"""Tasks on a device."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hatrack.tasks.split import Place, Split, place
from hatrack.tasks.task import Task


def move(tasks: Sequence[Task], device: torch.device | str, *, room: int | None = None) -> list[Task]:
    """The tasks on a device; images that they share stay shared.

    If the images take more than `room` bytes (by default half of the memory that a GPU has free), they stay in the host's
    memory and are fetched ahead while training.
    """
    device = torch.device(device)
    if room is None and device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[0] // 2
    stores = {place(s.x): s.x for t in tasks for s in (t.train, t.valid, t.test)}
    staged = room is not None and sum(x.nbytes for x in stores.values()) > room
    memo: dict[Place, Tensor] = {}

    def to(t: Tensor) -> Tensor:
        key = place(t)
        if key not in memo:
            memo[key] = t.to(device)
        return memo[key]

    def split(s: Split) -> Split:
        pixels = None if s.view.pixels is None else to(s.view.pixels)
        return replace(
            s,
            x=s.x if staged else to(s.x),
            y=s.y.to(device),
            task=s.task.to(device) if isinstance(s.task, Tensor) else s.task,
            view=replace(s.view, mean=s.view.mean.to(device), std=s.view.std.to(device), pixels=pixels),
            rows=s.rows.to(device),
            staged=staged,
        )

    return [replace(t, train=split(t.train), valid=split(t.valid), test=split(t.test)) for t in tasks]
