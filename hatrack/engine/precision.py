"""How matrix products are computed: float32, tf32 or bfloat16."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from hatrack.engine.choice import Precision


@contextmanager
def precision_scope(precision: Precision, device: torch.device) -> Iterator[None]:
    """Compute matrix products and convolutions of the block in this precision; weights and sums stay float32.

    Args:
        precision: "tf32" (a GPU's 19-bit products; a CPU uses float32 instead), "float32" or "bfloat16".
        device: where it is computed.
    """
    check_precision(precision, device)
    gpu = device.type == "cuda"
    with (
        _gpu_flags(tf32=precision != "float32") if gpu else nullcontext(),
        torch.autocast(  # without its cache: weights change within the block
            device.type, torch.bfloat16, enabled=precision == "bfloat16", cache_enabled=False
        ),
    ):
        yield


def check_precision(precision: Precision, device: torch.device) -> None:
    """Raise an error if a device can't compute in a precision."""
    if precision == "bfloat16" and device.type != "cuda":  # some processors crash at the first product
        raise ValueError("--precision bfloat16 needs a GPU")


@contextmanager
def _gpu_flags(*, tf32: bool) -> Iterator[None]:
    """Set torch's flags for the block. They are global: they apply to all threads."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = cuda.allow_tf32, cudnn.allow_tf32, cudnn.deterministic
    cuda.allow_tf32 = cudnn.allow_tf32 = tf32  # both: their defaults differ
    cudnn.deterministic = True  # the same run gives the same bits
    try:
        yield
    finally:
        cuda.allow_tf32, cudnn.allow_tf32, cudnn.deterministic = before
