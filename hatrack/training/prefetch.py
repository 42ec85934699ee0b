"""Batches for the step when the images don't fit on the device: they stay in the host's memory and are fetched ahead."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from hatrack.tasks.batches import split_batches
from hatrack.tasks.split import Split


class Prefetcher:
    """Gives out the numbers of the examples of each batch; `split` is what the step takes them from.

    A split that is on the device is used as it is. For one that is staged, `split` has room for the images of a few batches
    on the device; a thread gathers those of the next batches in pinned memory while the device works on the present ones.
    For one that is streamed, `split` has room for one batch, and its workers read the next ones meanwhile.
    """

    def __init__(self, split: Split, batch: int, *, ahead: int = 32) -> None:
        self.source, self.batch, self.ahead = split, batch, ahead
        self.split = split
        if split.on_host:
            self.rows = split.rows.cpu()
            device, room = split.y.device, min(batch * (1 if split.stream else ahead) + 1, len(split))
            self.pinned = [] if split.stream else [_host_buffer(split, room, device) for _ in range(2)]
            self.split = replace(
                split,
                x=torch.empty((room, *split.x.shape[1:]), dtype=split.x.dtype, device=device),
                rows=torch.zeros_like(split.rows),  # where in that room each example lies now
                on_host=False,
                stream=None,
            )

    def __call__(self, order: Tensor, *, done: int = 0, seed: int = 0) -> Iterator[Tensor]:
        """The batches of an epoch, in this order.

        Args:
            order: the numbers of the examples.
            done: how many batches are given out only for their numbers, so that streamed images of them are not read.
            seed: decides what random transforms of streamed images draw.
        """
        if self.source.stream is not None:
            yield from self._streamed(split_batches(order, self.batch), done, seed)
            return
        if not self.source.on_host:
            yield from split_batches(order, self.batch)
            return
        batches = split_batches(order, self.batch)
        groups = [batches[k : k + self.ahead] for k in range(0, len(batches), self.ahead)]
        parts = [torch.cat(group) for group in groups]
        host = [part.cpu() for part in parts]
        sent = [torch.cuda.Event() if order.is_cuda else None for _ in self.pinned]  # type: ignore[no-untyped-call]
        with ThreadPoolExecutor(1) as pool:
            following = pool.submit(self._gather, host[0], self.pinned[0])
            for number, part in enumerate(parts):
                images, event = following.result(), sent[number % 2]
                if number + 1 < len(parts):
                    other = sent[(number + 1) % 2]
                    if number and other is not None:
                        other.synchronize()
                    following = pool.submit(self._gather, host[number + 1], self.pinned[(number + 1) % 2])
                self.split.x[: len(part)].copy_(images, non_blocking=True)
                self.split.rows[part] = torch.arange(len(part), device=part.device)
                if event is not None:
                    event.record()
                yield from groups[number]

    def _streamed(self, batches: list[Tensor], done: int, seed: int) -> Iterator[Tensor]:
        """Copy the images of each batch into the room before it is given out."""
        assert self.source.stream is not None
        yield from batches[:done]
        rows = [self.rows[index.cpu()] for index in batches[done:]]
        for index, images in zip(batches[done:], self.source.stream.read_all(rows, seed), strict=True):
            self.split.x[: len(index)].copy_(images, non_blocking=True)
            self.split.rows[index] = torch.arange(len(index), device=index.device)
            yield index

    def _gather(self, part: Tensor, buffer: Tensor) -> Tensor:
        return torch.index_select(self.source.x, 0, self.rows[part], out=buffer[: len(part)])


def _host_buffer(split: Split, room: int, device: torch.device) -> Tensor:
    shape = (room, *split.x.shape[1:])
    return torch.empty(shape, dtype=split.x.dtype, pin_memory=device.type == "cuda")
