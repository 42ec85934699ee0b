"""An operation that tells torch's compiler to compute a tensor once and to keep it in memory.

The compiler repeats cheap operations wherever their result is read. This saves memory traffic as long as few places read it.
"""

from typing import Any

import torch
from torch import Tensor

library: Any = torch.library.Library("hatrack", "DEF")  # type: ignore[no-untyped-call]
library.define("realized(Tensor x) -> Tensor")
library.impl("realized", Tensor.clone, "CompositeExplicitAutograd")
torch.library.register_fake("hatrack::realized", torch.empty_like, lib=library)
realized: Any = torch.ops.hatrack.realized.default
_known: list[Any] = []  # what the compiler was told


def teach_compiler() -> None:
    """Tell torch's compiler what the operation means. It must have been imported."""
    from torch._inductor.lowering import register_lowering

    def keep(x: Any) -> Any:
        x.realize()
        return x

    if not _known:
        _known.append(register_lowering(realized, type_promotion_kind=None)(keep))
