"""Images that are read anew whenever they are needed, by worker processes where that is asked for: see `Task.from_loaders`.

A random transform draws from generators that are seeded for every single item: by the seed, the task, the fit, the epoch and
the number of the item. So neither the number of workers nor the step at which a run was stopped changes a bit.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from hatrack.seeds import derive
from hatrack.tasks.items import keep_generators
from hatrack.tasks.transform import scaled

PIECE = 64  # items that a worker reads at once, at most


class Reader(Protocol):
    """Reads images by their rows, in this process or in a worker."""

    def __call__(self, rows: Tensor, seed: int) -> Tensor:
        """Return the images of these rows (rows, *raw shape); `seed` decides what random transforms draw."""


class Failure(str):
    """An error of a worker, in one line."""


@dataclass(frozen=True, eq=False)
class Stream:
    """Images in a store that is read when they are needed.

    Attributes:
        reader: reads images by their rows.
        workers: how many processes read; 0 reads in this one.
        options: further arguments of the DataLoader, such as `worker_init_fn`.
    """

    reader: Reader
    workers: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def read(self, rows: Tensor, seed: int = 0) -> Tensor:
        """Read the images of these rows in this process."""
        with keep_generators():
            return self.reader(rows.cpu(), seed)

    def read_all(self, batches: Sequence[Tensor], seed: int = 0) -> Iterator[Tensor]:
        """Yield the images of each batch of rows (int64, in the host's memory). Workers read ahead until the end."""
        if not self.workers or sum(map(len, batches)) <= PIECE:
            yield from (self.read(rows, seed) for rows in batches)
            return
        parts = [torch.split(batch, PIECE) for batch in batches]
        pieces = self._by_workers(Pass(self.reader, [piece for part in parts for piece in part], seed))
        for part in parts:
            found = [next(pieces) for _ in part]
            yield found[0] if len(found) == 1 else torch.cat(found)

    def _by_workers(self, pieces: "Pass") -> Iterator[Tensor]:
        """Yield the pieces of a pass, which worker processes read."""
        # The generator is a new one, because a DataLoader draws a number from the global one, with which dropout goes on.
        loader: DataLoader[Any] = DataLoader(
            pieces,
            batch_size=None,
            num_workers=self.workers,
            collate_fn=_as_it_is,
            generator=torch.Generator(),
            **{**self.options, "worker_init_fn": Begin(self.options.get("worker_init_fn"), gc.isenabled())},
        )
        try:
            with _no_collection():
                found = iter(loader)
        except Exception as error:  # a data set that can't be sent may raise anything
            raise ValueError(f"the data set can't be sent to worker processes ({error}); workers=0 needs none") from None
        try:
            for piece in found:
                if isinstance(piece, Failure):
                    raise ValueError(str(piece))
                yield piece
        except RuntimeError as error:  # torch's text has several lines
            raise RuntimeError(f"a worker process that reads images ended: {str(error).splitlines()[0]}") from error


class Pass(Dataset[Any]):
    """The pieces of one pass over some images, as a data set of which every item is a piece.

    Args:
        reader: reads images.
        pieces: the rows of each piece.
        seed: decides what random transforms draw.
    """

    def __init__(self, reader: Reader, pieces: Sequence[Tensor], seed: int) -> None:
        self.reader, self.seed = reader, seed
        self.rows, self.sizes = torch.cat(list(pieces)), [len(piece) for piece in pieces]
        self.starts = [0, *torch.tensor(self.sizes).cumsum(0).tolist()]

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, number: int) -> Tensor | Failure:
        try:
            return self.reader(self.rows[self.starts[number] : self.starts[number + 1]], self.seed)
        except ValueError as error:  # DataLoaders would add the whole traceback to its text
            return Failure(error)


@dataclass(frozen=True)
class Begin:
    """What a worker does first.

    A forked worker has inherited what its parent was about to free. To free a recording of a GPU there would abort it, so
    that the worker leaves all that it inherited alone: it begins without garbage collection, see `_no_collection`.

    Attributes:
        own: the user's `worker_init_fn`, if there is one.
        collects: whether garbage is collected afterwards, as in the parent.
    """

    own: Callable[[int], None] | None
    collects: bool

    def __call__(self, number: int) -> None:
        gc.freeze()
        if self.collects:
            gc.enable()
        if self.own is not None:
            self.own(number)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Within it no garbage is collected, nor in processes that are forked there, until they say so."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _as_it_is(piece: Any) -> Any:
    return piece


@dataclass(frozen=True, eq=False)
class Stored:
    """Reads images of a tensor in memory, beside which others are streamed.

    Attributes:
        x: the images, in the host's memory, because worker processes can't use a GPU.
    """

    x: Tensor

    def __call__(self, rows: Tensor, seed: int) -> Tensor:
        return self.x.index_select(0, rows)


@dataclass(frozen=True, eq=False)
class Joined:
    """Reads images of several stores as rows of one, flattened and padded with zeros to one width.

    Attributes:
        readers: the readers of the stores.
        sizes: how many rows each has.
        width: the numbers per image.
        mixed: whether some have bytes and others floats, so that bytes become floats.
    """

    readers: Sequence[Reader]
    sizes: Sequence[int]
    width: int
    mixed: bool

    def __call__(self, rows: Tensor, seed: int) -> Tensor:
        out: Tensor | None = None
        first = 0
        for number, (reader, size) in enumerate(zip(self.readers, self.sizes, strict=True)):
            places = ((rows >= first) & (rows < first + size)).nonzero()[:, 0]
            if len(places):
                x = reader(rows[places] - first, derive(seed, "store", number))
                x = (scaled(x) if self.mixed else x).flatten(1)
                out = x.new_zeros(len(rows), self.width) if out is None else out
                out[places] = F.pad(x, (0, self.width - x.shape[1]))
            first += size
        assert out is not None, "rows of no store"
        return out


def join_streams(streams: Sequence[Stream | None], stores: Sequence[Tensor], width: int, *, mixed: bool) -> Stream:
    """Return a stream over several stores, some of which lie in memory.

    Args:
        streams: what reads each store; None for one in memory.
        stores: the images of those; of the others a tensor without data, of their shape.
        width: the numbers of the largest image.
        mixed: whether some are bytes and others floats.
    """
    readers: list[Reader] = [s.reader if s else Stored(x.cpu()) for s, x in zip(streams, stores, strict=True)]
    options: dict[str, Any] = {}
    for stream in streams:
        options |= stream.options if stream else {}
    workers = max(stream.workers for stream in streams if stream)
    return Stream(Joined(readers, [len(x) for x in stores], width, mixed), workers, options)
