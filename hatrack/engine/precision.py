"""How matrix products are computed: float32, tf32 or bfloat16."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from hatrack.engine.choice import Precision


@contextmanager
def precision_scope(precision: Precision, device: torch.device) -> Iterator[None]:
    """Within it, products of matrices and convolutions are computed in this precision; weights and sums stay float32.

    tf32 (a GPU's 19-bit products) and bfloat16 are faster; a CPU has no tf32 and computes in float32 then.
    """
    check_precision(precision, device)
    gpu = device.type == "cuda"
    with (
        _gpu_flags(tf32=precision != "float32") if gpu else nullcontext(),
        torch.autocast(  # no cache: weights change while this lasts
            device.type, torch.bfloat16, enabled=precision == "bfloat16", cache_enabled=False
        ),
    ):
        yield


def check_precision(precision: Precision, device: torch.device) -> None:
    if precision == "bfloat16" and device.type != "cuda":  # some processors end the program at the first product
        raise ValueError("--precision bfloat16 needs a GPU")


@contextmanager
def _gpu_flags(*, tf32: bool) -> Iterator[None]:
    """They hold for all threads."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = cuda.allow_tf32, cudnn.allow_tf32, cudnn.deterministic
    cuda.allow_tf32 = cudnn.allow_tf32 = tf32  # both: they differ by default
    cudnn.deterministic = True  # the same run gives the same bits again
    try:
        yield
    finally:
        cuda.allow_tf32, cudnn.allow_tf32, cudnn.deterministic = before
