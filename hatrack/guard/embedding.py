"""The embedding of the task being learned: a parameter within the backbone whose gradient only the guard sees.

The embedding lies in the backbone, so that `state_dict`, a loop that loads its best state, and DistributedDataParallel carry
it. Its gradient must not count when the user clips gradients, as it does not in a Trainer, and must be divided by the scale
of the loss if a GradScaler is used. So the gradient is added up in a buffer of its own, and `.grad` has a tiny mark in every
place instead. The mark tells three things: whether the gradient has been cleared since (whoever calls `zero_grad`, on
whatever object), whether it was infinite, and by what power of two the user has scaled all gradients.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

MARK = 2.0**-60  # its square adds nothing to any norm
FRAMES = 16  # how many calls up a GradScaler is searched for


class Embedding(nn.Module):
    """The embedding, and the gradient of the loss since it was cleared.

    Args:
        count: how many units or weights have gates.
        device: where the embedding lies.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.zeros(count, device=device))
        self.held = torch.zeros(0)  # (count,), the sum of the gradients of the loss
        self.arrivals = torch.zeros(())  # how many gradients were added
        self.hook: Any = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the input: whoever iterates over a backbone that is a Sequential finds this module among its layers."""
        return x

    def open(self) -> None:
        """Begin to hold gradients."""
        e = self.embedding
        e.grad, self.held, self.arrivals = None, torch.zeros_like(e), torch.zeros((), device=e.device)
        self.hook = e.register_hook(self._arrive)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Stop holding gradients, and drop them."""
        if self.hook is not None:
            self.hook.remove()
        self.hook, self.embedding.grad = None, None
        self.held, self.arrivals = torch.zeros(0), torch.zeros(())

    @torch.no_grad()
    def _arrive(self, grad: Tensor) -> Tensor:
        """Add a gradient to those that are held, and return the mark in its place."""
        old = self.embedding.grad
        if old is None:
            self.held, self.arrivals = grad.clone(), torch.ones_like(self.arrivals)
        else:  # marks of 0: zero_grad(set_to_none=False) was called
            self.held = torch.where(old != 0, self.held, 0) + grad
            self.arrivals = torch.where(old[0] != 0, self.arrivals, 0) + 1
        return torch.full_like(grad, MARK) + 0 * grad.sum()  # NaN if a gradient is infinite, which a GradScaler must see

    @torch.no_grad()
    def take(self, optimizer: Optimizer) -> Tensor | None:
        """Return the gradient of the loss, not scaled, and clear it; None if there is none.

        Args:
            optimizer: the optimizer whose step this is.
        """
        mark = self.embedding.grad
        if mark is None or self.hook is None:
            return None
        self.embedding.grad = None  # the optimizer leaves alone what has no gradient
        if _skips(optimizer):
            return None
        held = torch.where(mark != 0, self.held, 0)  # a mark of NaN is no 0
        scaler = _grad_scaler()
        share = _power_of_two(mark[0] / (MARK * self.arrivals)) if scaler is None else 1 / scaler.get_scale()
        return torch.nan_to_num(held * share, nan=0.0, posinf=0.0, neginf=0.0)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **keywords: Any) -> None:
        """Take the embedding of a state_dict; one from before the backbone was protected has none."""
        state_dict.setdefault(f"{prefix}embedding", self.embedding.detach())
        super()._load_from_state_dict(state_dict, prefix, *args, **keywords)


def _power_of_two(ratio: Tensor) -> Tensor:
    """Return a ratio that is a power of two, a scale of the loss that was undone by hand; otherwise 1: clipping."""
    mantissa, _ = torch.frexp(ratio)
    return torch.where(mantissa == 0.5, ratio, 1.0)


def _skips(optimizer: Optimizer) -> bool:
    """Return whether a fused optimizer will skip this step, because a GradScaler has found infinite gradients."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found > 0)


def _grad_scaler() -> torch.amp.GradScaler | None:
    """Return the GradScaler that called the step of the optimizer, if one did. Nothing else tells its scale."""
    frame = sys._getframe(1)
    for _ in range(FRAMES):
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.amp.GradScaler):
            return owner if owner.is_enabled() else None
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None
