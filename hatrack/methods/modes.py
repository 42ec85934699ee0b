"""Evaluation mode for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Within it the module is in evaluation mode; afterwards, also after an error, it is in the mode that it had."""
    mode = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(mode)
