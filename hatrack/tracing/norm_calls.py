"""The normalisation functions of torch, and the arguments of their calls by name."""

import inspect
from typing import Any

from torch.nn import functional as F

NORMS = {f: tuple(inspect.signature(f).parameters) for f in (
    F.batch_norm, F.instance_norm, F.layer_norm, F.group_norm, F.rms_norm,
)}  # fmt: skip


def arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of a call of a normalisation function, by name."""
    return dict(zip(NORMS[func], args, strict=False)) | (kwargs or {})
