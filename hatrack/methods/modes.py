"""Evaluation mode for a while, and learning under autocast."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hatrack.methods.method import Method


@contextmanager
def evaluation_mode(method: "Method") -> Iterator[None]:
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
