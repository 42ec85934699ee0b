"""How matrix products are computed: float32, tf32 or bfloat16."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F

from hatrack.engine.choice import PRECISIONS, Precision
from hatrack.engine.helpers import without_main
from hatrack.options import choose


@contextmanager
def precision_scope(precision: Precision, device: torch.device, *, cpu: bool = False) -> Iterator[None]:
    """Compute matrix products and convolutions of the block in this precision; weights and sums stay float32.

    Args:
        precision: "tf32" (a GPU's 19-bit products; a CPU uses float32 instead), "float32" or "bfloat16".
        device: where it is computed.
        cpu: also allow bfloat16 on a CPU, if it can.
    """
    check_precision(precision, device, cpu=cpu)
    gpu = device.type == "cuda"
    with (
        _gpu_flags(tf32=precision != "float32") if gpu else nullcontext(),
        torch.autocast(  # without its cache: weights change within the block
            device.type, torch.bfloat16, enabled=precision == "bfloat16", cache_enabled=False
        ),
    ):
        yield


def check_precision(precision: Precision, device: torch.device, *, cpu: bool = False) -> None:
    """Raise an error if there is no such precision, or a device can't compute in it."""
    choose("precision", precision, PRECISIONS)
    if precision != "bfloat16" or device.type == "cuda":
        return
    if not cpu:
        raise ValueError("--precision bfloat16 needs a GPU")
    if not cpu_computes_bfloat16():
        raise ValueError("precision='bfloat16' needs a GPU: this processor can't compute in it")


@cache
def cpu_computes_bfloat16() -> bool:
    """Return whether this CPU computes in bfloat16. It is tried in a child process, because some processors end it with an
    illegal instruction."""
    process = multiprocessing.get_context("spawn").Process(target=_try_bfloat16, daemon=True)
    with without_main():
        process.start()
    process.join()
    return process.exitcode == 0


def _try_bfloat16() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        weight = torch.randn(8, 3, 3, 3, requires_grad=True)
        loss = (F.conv2d(torch.randn(4, 3, 9, 9), weight).flatten(1) @ torch.randn(392, 64)).sum()
        loss.backward()  # type: ignore[no-untyped-call]


@contextmanager
def _gpu_flags(*, tf32: bool) -> Iterator[None]:
    """Set torch's flags for the block. They are global: they apply to all threads."""
    flags: Any = torch.backends
    matmul, cudnn = flags.cuda.matmul, flags.cudnn
    parts = matmul, cudnn.conv, cudnn.rnn
    before, deterministic = [part.fp32_precision for part in parts], cudnn.deterministic
    _set_tf32([tf32, tf32], ["tf32" if tf32 else "ieee"] * 3)
    cudnn.deterministic = True  # the same run gives the same bits
    try:
        yield
    finally:
        _set_tf32([precision == "tf32" for precision in before[:2]], before)
        cudnn.deterministic = deterministic


def _set_tf32(allowed: list[bool], precisions: list[str]) -> None:
    """Set both kinds of torch's flags, for matrix products, convolutions and recurrent layers. Where a user has set only the
    new ones, it is an error to read the old ones, as torch's compiler does, and these alone would not decide."""
    flags: Any = torch.backends
    flags.cuda.matmul.allow_tf32, flags.cudnn.allow_tf32 = allowed
    for part, precision in zip((flags.cuda.matmul, flags.cudnn.conv, flags.cudnn.rnn), precisions, strict=True):
        part.fp32_precision = precision
