"""Whether the operations of a step are being captured for the compiler."""

import torch


def is_capturing() -> bool:
    """Return whether operations are being captured for the compiler."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
