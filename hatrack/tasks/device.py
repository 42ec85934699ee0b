"""Tasks and splits on a device, or with their images in the host's memory if they do not fit there."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hatrack.tasks.split import Place, Split, place
from hatrack.tasks.task import Task


def to_device(task: Task, device: torch.device | str) -> Task:
    """Return the task on a device; one that is there already is returned as it is."""
    return task if _is_on(task.train, device) else all_to_device([task], device)[0]


def split_to_device(split: Split, device: torch.device | str) -> Split:
    """Return the split on a device; one that is there already is returned as it is."""
    return split if _is_on(split, device) else _splits_to_device([split], torch.device(device), None)[0]


def _is_on(split: Split, device: torch.device | str) -> bool:
    """Return whether a split lies on a device. Its labels decide: its images may stay in the host's memory."""
    return split.y.device == torch.empty(0, device=device).device  # "cuda" is "cuda:0"


def all_to_device(tasks: Sequence[Task], device: torch.device | str, *, room: int | None = None) -> list[Task]:
    """Return the tasks on a device; images that they share stay shared.

    If the images take more than `room` bytes (by default half of the memory that a GPU has free), they stay in the host's
    memory and are fetched ahead while training.
    """
    splits = _splits_to_device([s for t in tasks for s in (t.train, t.valid, t.test)], torch.device(device), room)
    return [
        replace(task, train=splits[3 * k], valid=splits[3 * k + 1], test=splits[3 * k + 2]) for k, task in enumerate(tasks)
    ]


def _splits_to_device(splits: Sequence[Split], device: torch.device, room: int | None) -> list[Split]:
    if room is None and device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[0] // 2
    stores = {place(s.x): s.x for s in splits if s.stream is None}
    on_host = room is not None and sum(x.nbytes for x in stores.values()) > room
    memo: dict[Place, Tensor] = {}

    def to(t: Tensor) -> Tensor:
        key = place(t)
        if key not in memo:
            memo[key] = t.to(device)
        return memo[key]

    def move(s: Split) -> Split:
        pixels = None if s.transform.pixels is None else to(s.transform.pixels)
        return replace(
            s,
            x=s.x if on_host or s.stream is not None else to(s.x),
            y=s.y.to(device),
            task=s.task.to(device) if isinstance(s.task, Tensor) else s.task,
            transform=replace(s.transform, mean=s.transform.mean.to(device), std=s.transform.std.to(device), pixels=pixels),
            rows=s.rows.to(device),
            target=s.target.to(device),
            on_host=on_host or s.stream is not None,
        )

    return [move(s) for s in splits]
