"""The batches of `settle`, on which running statistics are estimated when a block ends; mistakes are told when it begins."""

import inspect
import operator
import random
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from hatrack.options import shown

NONE = "settle gave no batch of two or more inputs"


def inputs(loader: Iterable[Any], device: torch.device) -> Iterator[Tensor]:
    """Return the inputs in the batches of a loader. One input alone has no variance, and is left out."""
    some = False
    for batch in loader:
        x = _input_of(batch)
        if len(x) > 1:
            some = True
            yield x.to(device)
    if not some:
        raise ValueError(NONE)


def check_settle(settle: Any, dimensions: int) -> None:
    """Raise an error if batches can't be used, as far as that can be seen without taking one from the user's loop.

    A list is looked at as a whole. The first example of a DataLoader is loaded by a loader of our own. An iterator can only
    be asked whether it is exhausted, and other objects are taken as they are: their batches are checked when the block ends.

    Args:
        settle: what the user gave; None: nothing.
        dimensions: how many dimensions a batch has, as the example has.
    """
    if settle is None:
        return
    if not isinstance(settle, Iterable) or isinstance(settle, Tensor | np.ndarray | Mapping | str | bytes):
        raise ValueError(f"settle must give batches of inputs, such as a loader or [x], not {shown(settle)}")
    if isinstance(settle, list | tuple):
        if max([0, *(len(_checked(batch, dimensions)) for batch in settle)]) < 2:
            raise ValueError(NONE)
    elif isinstance(settle, DataLoader):
        _check_loader(settle, dimensions)
    elif _is_exhausted(settle):
        raise ValueError(f"{NONE}: the iterator ({type(settle).__name__}) is exhausted")


def _input_of(batch: Any) -> Tensor:
    """Return the inputs in a batch."""
    x = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if not isinstance(x, Tensor):
        hint = ", such as (batch[key] for batch in loader)" if isinstance(x, Mapping) else ""
        raise ValueError(f"settle must give batches whose first part is a tensor of inputs{hint}, not {type(x).__name__}")
    return x


def _checked(batch: Any, dimensions: int) -> Tensor:
    """Return the inputs in a batch; raise an error unless they have as many dimensions as the example."""
    x = _input_of(batch)
    if x.dim() != dimensions:
        raise ValueError(f"settle gave a batch of shape {tuple(x.shape)}, not of {dimensions} dimensions as the example")
    return x


def _check_loader(loader: DataLoader[Any], dimensions: int) -> None:
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        return  # to take a batch might change what the user's loop gets
    if loader.batch_size == 1:
        raise ValueError(f"{NONE}: the loader has batch_size=1")
    try:
        empty, batch = len(loader) == 0, _first_batch(loader)
    except Exception:  # a sampler of its own, or data that no process can read: the user's loop tells more
        return
    if empty:
        raise ValueError(NONE)
    _checked(batch, dimensions)


def _first_batch(loader: DataLoader[Any]) -> Any:
    """Return a batch of the first example, twice. The user's loader, its workers and all random numbers stay as they are."""
    own: DataLoader[Any] = DataLoader(
        loader.dataset,
        batch_size=2,
        sampler=[0, 0],
        num_workers=min(1, loader.num_workers),  # what workers open must not be opened before they start
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),
    )
    with _without_drawing(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return next(iter(own))


@contextmanager
def _without_drawing() -> Iterator[None]:
    """Within the block random numbers may be drawn; afterwards all generators are where they were."""
    python, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


def _is_exhausted(iterator: Any) -> bool:
    """Return whether an iterator is known to have nothing left."""
    if inspect.isgenerator(iterator):
        return inspect.getgeneratorstate(iterator) == inspect.GEN_CLOSED
    return isinstance(iterator, Iterator) and operator.length_hint(iterator, 1) == 0
