"""Functions of torch that call layers inside, run so that the modes of this package see these calls.

`F.multi_head_attention_forward` hands itself to an active mode as one call, and within this call the mode is off. Its body,
run without this first step, calls `F.linear` and `F.scaled_dot_product_attention` as any module does. The fused kernels of
`nn.MultiheadAttention` and `nn.TransformerEncoderLayer` for evaluation are never used while a mode is active.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

from torch.nn import functional as F


def opened(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function of torch, but for its first step: it does not hand itself to an active mode."""
    body = cast("FunctionType", function)
    without = {**body.__globals__, "has_torch_function": lambda tensors: False}
    copied = FunctionType(body.__code__, without, body.__name__, body.__defaults__, body.__closure__)
    copied.__kwdefaults__ = body.__kwdefaults__
    return copied


OPENED: dict[Any, Callable[..., Any]] = {F.multi_head_attention_forward: opened(F.multi_head_attention_forward)}
