"""Whether the operations of a step are being captured for the compiler."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class CapturingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode under which a step executes the operations that it executes when they are captured."""


def is_capturing() -> bool:
    """Return whether operations are being captured for the compiler, or executed as if they were."""
    modes = (torch._C._get_dispatch_stack_at(place) for place in range(torch._C._len_torch_dispatch_stack()))
    proxy = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    return proxy is not None or any(isinstance(mode, CapturingMode) for mode in modes)
