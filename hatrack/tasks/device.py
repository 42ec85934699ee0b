"""Tasks on a device, or in the host's memory if they don't fit there."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hatrack.tasks.split import Place, Split, place
from hatrack.tasks.task import Task


def to_device(task: Task, device: torch.device | str) -> Task:
    """The task on a device; one that is there already is returned as it is."""
    device = torch.empty(0, device=device).device  # "cuda" is "cuda:0"
    return task if task.train.y.device == device else all_to_device([task], device)[0]


def all_to_device(tasks: Sequence[Task], device: torch.device | str, *, room: int | None = None) -> list[Task]:
    """The tasks on a device; images that they share stay shared.

    If the images take more than `room` bytes (by default half of the memory that a GPU has free), they stay in the host's
    memory and are fetched ahead while training.
    """
    device = torch.device(device)
    if room is None and device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[0] // 2
    stores = {place(s.x): s.x for t in tasks for s in (t.train, t.valid, t.test)}
    on_host = room is not None and sum(x.nbytes for x in stores.values()) > room
    memo: dict[Place, Tensor] = {}

    def to(t: Tensor) -> Tensor:
        key = place(t)
        if key not in memo:
            memo[key] = t.to(device)
        return memo[key]

    def split(s: Split) -> Split:
        pixels = None if s.transform.pixels is None else to(s.transform.pixels)
        return replace(
            s,
            x=s.x if on_host else to(s.x),
            y=s.y.to(device),
            task=s.task.to(device) if isinstance(s.task, Tensor) else s.task,
            transform=replace(s.transform, mean=s.transform.mean.to(device), std=s.transform.std.to(device), pixels=pixels),
            rows=s.rows.to(device),
            on_host=on_host,
        )

    return [replace(t, train=split(t.train), valid=split(t.valid), test=split(t.test)) for t in tasks]
