"""A state that can't be loaded into a method leaves it as it was: all tensors and modules, and which tasks are learned.

torch loads what fits and raises an error for the rest. By then the list of finished tasks would be that of the state, and a
task that it does not know would be overwritten by the next one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hatrack.methods.growth.growth import remember
from hatrack.methods.hidden_state import HiddenState

if TYPE_CHECKING:
    from hatrack.methods.method import Method


@contextmanager
def unchanged_by_failed_load(method: "Method") -> Iterator[None]:
    """If the block fails, give the method what it had: attributes, modules, tensors and their values."""
    undo, hidden = remember(method), HiddenState(method)
    tables = [(table, dict(table)) for part in method.net.trunk.modules() for table in _tables(part)]
    values = [(tensor, tensor.detach().clone()) for tensor in (*method.parameters(), *method.buffers())]
    try:
        yield
    except BaseException:
        undo()
        for table, before in tables:  # `assign=True` replaces the tensors of the trunk
            table.clear()
            table.update(before)
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)
        hidden.restore()
        raise


def _tables(part: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    """Return the tables of a module: its parameters, buffers and modules."""
    return part._parameters, part._buffers, part._modules
