"""The embedding of the task being learned: a parameter within the backbone whose gradient only the guard sees.

The embedding lies in the backbone, so that `state_dict`, a loop that loads its best state, and DistributedDataParallel carry
it. Its gradient must not count when the user clips gradients, as it does not in a Trainer, and must be divided by the scale
of the loss if a GradScaler is used. So the gradient is added up in a buffer of its own, and `.grad` has a tiny mark in every
place instead. The mark tells three things: whether the gradient has been cleared since (whoever calls `zero_grad`, on
whatever object), whether it was infinite, and by what factor the user has scaled all gradients by hand. A factor that is a
whole number, one over a whole number, or a power of two is followed; any other one is that of clipping, and is not.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

MARK = 2.0**-60  # its square adds nothing to any norm
FRAMES = 16  # how many calls up a GradScaler is searched for
MOST = 2**16  # the largest whole number by which gradients are divided by hand, such as the number of tokens in a batch
ROUNDING = 4e-7  # of a factor, relative: a few roundings of float32


class Embedding(nn.Module):
    """The embedding, and the gradient of the loss since it was cleared.

    Args:
        count: how many units or weights have gates.
        device: where the embedding lies.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.zeros(count, device=device, dtype=torch.float32))  # whatever the default is
        self.held = torch.zeros(0)  # (count,), the sum of the gradients of the loss
        self.arrivals = torch.zeros(())  # how many gradients were added
        self.hook: Any = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the input: whoever iterates over a backbone that is a Sequential finds this module among its layers."""
        return x

    def open(self) -> None:
        """Begin to hold gradients. If the user has stopped the whole backbone, the embedding stays stopped."""
        e, stopped = self.embedding, not self.embedding.requires_grad
        e.requires_grad_(True)  # without that no hook can be registered
        e.grad, self.held, self.arrivals = None, torch.zeros_like(e), torch.zeros((), device=e.device)
        self.hook = e.register_hook(self._arrive)  # type: ignore[no-untyped-call]
        e.requires_grad_(not stopped)

    def follow_device(self) -> None:
        """Move the gradients that are held to the device of the embedding."""
        self.held, self.arrivals = self.held.to(self.embedding.device), self.arrivals.to(self.embedding.device)

    def close(self) -> None:
        """Stop holding gradients, and drop them."""
        if self.hook is not None:
            self.hook.remove()
        self.hook, self.embedding.grad = None, None
        self.held, self.arrivals = torch.zeros(0), torch.zeros(())

    @torch.no_grad()
    def _arrive(self, grad: Tensor) -> Tensor:
        """Add a gradient to those that are held, and return the mark in its place.

        With PMASK these vectors are as long as all weights together. New memory of that size is slow on a CPU, so the held
        gradient stays where it is, and the memory of the gradient, which nobody else reads, becomes that of the mark.
        """
        old = self.embedding.grad
        if old is None:
            self.held.copy_(grad)
            self.arrivals.fill_(1)
        else:  # marks of 0: zero_grad(set_to_none=False) was called
            self.held.masked_fill_(old == 0, 0).add_(grad)
            self.arrivals = torch.where(old[0] != 0, self.arrivals, 0) + 1
        mark = MARK + 0 * grad.sum()  # NaN if a gradient is infinite, which a GradScaler must see
        ours = not grad.requires_grad and grad.is_contiguous()  # otherwise the graph of a second derivative may have it
        return (grad if ours else torch.empty_like(self.embedding)).copy_(mark)

    @torch.no_grad()
    def take(self, optimizer: Optimizer) -> Tensor | None:
        """Return the gradient of the loss, not scaled, and clear it; None if there is none. It is valid until the next one.

        Args:
            optimizer: the optimizer whose step this is.
        """
        mark = self.embedding.grad
        if mark is None or self.hook is None:
            return None
        self.embedding.grad = None  # the optimizer leaves alone what has no gradient
        if _skips(optimizer):
            return None
        cleared, held = mark == 0, self.held  # a mark of NaN is no 0
        if cleared.is_cuda or cleared.any():  # a GPU would have to wait for the answer, a CPU is quicker with it
            held.masked_fill_(cleared, 0)
        factor, scaler = mark[0] / (MARK * self.arrivals), _grad_scaler()
        scale = 1.0 if scaler is None else scaler.get_scale()
        if getattr(optimizer, "grad_scale", None) is None:  # otherwise a fused optimizer will divide by the scale itself
            factor = factor * scale
        return held.mul_(_by_hand(factor) / scale).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **keywords: Any) -> None:
        """Take the embedding of a state_dict; one from before the backbone was protected has none."""
        state_dict.setdefault(f"{prefix}embedding", self.embedding.detach())
        super()._load_from_state_dict(state_dict, prefix, *args, **keywords)


def _by_hand(factor: Tensor) -> Tensor:
    """Return the factor by which all gradients were multiplied, if a user did it; 1 if it was clipping.

    Nothing but the value tells the two apart. Users divide by a number of examples, tokens or batches, or undo a scale of
    the loss, which is a power of two. Clipping has any factor, and the gates are not clipped.
    """
    size = factor.abs()
    number = torch.maximum(size, 1 / size)
    nearest = number.round()
    whole = (number <= MOST) & ((number - nearest).abs() <= ROUNDING * number)
    exact = torch.where(size < 1, 1 / nearest, nearest).copysign(factor)
    return torch.where(whole, exact, torch.where(torch.frexp(size)[0] == 0.5, factor, 1.0))


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
