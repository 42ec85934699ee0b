"""Evaluation mode for a while, and learning within modes of the caller: autocast, and without gradients."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hatrack.methods.trained import TrainedMethod


@contextmanager
def evaluation_mode(method: "TrainedMethod") -> Iterator[None]:
    """Within it the method is in evaluation mode; afterwards, also after an error, it is in the mode that it had.

    Other threads wait, because the mode is one for all of them.
    """
    with method.lock:
        mode = method.training
        method.eval()
        try:
            yield
        finally:
            method.train(mode)


@contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Within it autocast casts weights anew at every use.

    It would otherwise keep the cast weights until its block ends, so that all steps of a block around `learn` would compute
    with the weights of the first one.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def with_gradients(method: "TrainedMethod") -> Iterator[None]:
    """Within it torch computes gradients, also if the caller has switched them off by `no_grad` or the inference mode.

    Tensors of the method that were made within the inference mode have none. If learning fails, the error names one.
    """
    with torch.inference_mode(False), torch.enable_grad():
        try:
            yield
        except RuntimeError as error:
            tensors = chain(method.named_parameters(), method.named_buffers())
            if (found := next((name for name, tensor in tensors if tensor.is_inference()), None)) is None:
                raise
            raise ValueError(
                f"the method can't learn, since its {found!r} was made within torch.inference_mode: build the trunk, the "
                "network and the method outside of it, or load the method there (learn may be called within it)"
            ) from error
