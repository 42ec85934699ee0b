"""Recurrent layers on a GPU without cuDNN.

cuDNN wants the weights of a recurrent layer in one piece of memory. Weights that were computed for a call, such as gated
ones, are not, so cuDNN would copy them together at every call. torch's own kernels take any weights.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_depth = 0  # how many blocks are active, in all threads
_before = True  # whether cuDNN was on before the first of them


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Switch cuDNN off in the block. The switch is that of the whole process; the last of several blocks restores it."""
    global _depth, _before
    with _lock:
        if not _depth:
            _before, torch.backends.cudnn.enabled = torch.backends.cudnn.enabled, False
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if not _depth:
                torch.backends.cudnn.enabled = _before
