"""Roll back the effects of operations on tensors: capturing and trying a step must leave no trace."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def is_written(argument: Any) -> bool:
    """Return whether an operation writes to an argument. The schema of batch norms does not say so of their statistics."""
    in_schema: bool = argument.alias_info is not None and argument.alias_info.is_write
    return in_schema or argument.name in ("running_mean", "running_var")


@contextmanager
def restore_afterwards(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Give these tensors their present values back at the end of the block."""
    before = [t.clone() for t in tensors]
    try:
        yield
    finally:
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old)


class Rollback(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context manager that rolls back, at its end, every tensor that an operation in the block wrote to."""

    def __enter__(self) -> Self:
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # by address: the memory as bytes, and a copy of its old content
        return cast(Self, super().__enter__())  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for memory, old in self.before.values():
                memory.copy_(old)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
        for argument in filter(is_written, func._schema.arguments):
            for tensor in tree_leaves(given.get(argument.name)):
                if isinstance(tensor, Tensor):  # the statistics of a norm may be None
                    self._save(tensor)
        return func(*args, **(kwargs or {}))

    def _save(self, tensor: Tensor) -> None:
        """Copy the memory of a tensor before the first write to it."""
        from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

        memory = tensor.untyped_storage()
        if memory.nbytes() and memory.data_ptr() not in self.before:
            with disable_proxy_modes_tracing():  # the copy is no part of the captured graph
                raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(memory)
                self.before[memory.data_ptr()] = raw, raw.clone()
