"""Weights of finished tasks while another one is learned: their gradients are masked, and their bits restored."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hatrack.methods.parts.freeze import LARGE, Freeze, real

FIRST, EVERY = 3, 64  # the steps after which the bits are compared: the first few, and then every so many
TOGETHER = ("cuda",)  # devices on which one operation over all weights is quicker than one for each


class Group(NamedTuple):
    """Frozen weights of one type on one device, as integers.

    One operation works on all of them, and there is none for bits. Products and sums of integers are as exact: an entry that
    is free is times 1 plus 0, a frozen one times 0 plus its bits.
    """

    freezes: list[Freeze]
    free: list[Tensor]  # 1 where a weight is free, 0 where it is frozen
    bits: list[Tensor]  # of the frozen ones, 0 elsewhere

    def mask_grads(self) -> None:
        """Set the gradients of frozen entries to 0."""
        there = [k for k, freeze in enumerate(self.freezes) if freeze.parameter.grad is not None]
        if there:
            grads = [_bits(self.freezes[k].parameter.grad, self.freezes[k]) for k in there]
            torch._foreach_mul_(grads, [self.free[k] for k in there])

    def restore(self, values: list[Tensor]) -> None:
        """Give frozen entries their bits back, in the values of the parameters."""
        bits = [_bits(value, freeze) for value, freeze in zip(values, self.freezes, strict=True)]
        torch._foreach_mul_(bits, self.free)
        torch._foreach_add_(bits, self.bits)


class FrozenBits:
    """What is frozen while a task is learned.

    Steps restore the bits. If something else than a step has changed them, as by clamping or rescaling all weights, they are
    restored before the next forward pass, which would compute with other weights than the task will have. The versions that
    torch counts show most changes at no cost. They do not show those by way of `.data`, so that after some steps the bits
    are compared. Once such a change was found, every forward pass restores the bits.

    Args:
        freezes: what is frozen, by parameter.
        finite: whether the other entries are kept finite, see `Freeze.restore`.
    """

    def __init__(self, freezes: Sequence[Freeze], *, finite: bool = True) -> None:
        self.all, self.finite = freezes, finite
        self.freezes = [freeze for freeze in freezes if not freeze.empty]
        self.always, self.compared = False, 0
        self.groups: list[Group] = []
        self.device = torch.device("meta")  # of the groups
        self.note()

    def note(self) -> None:
        """Note that the frozen weights have their bits now."""
        self.versions = [freeze.parameter._version for freeze in self.freezes]

    @torch.no_grad()
    def mask_grads(self) -> None:
        """Set the gradients of frozen entries to 0; raise if one is sparse."""
        for freeze in self.all:
            check_dense(freeze)
        for group in self._grouped():
            group.mask_grads()
        if not self.groups:
            for freeze in self.freezes:
                freeze.mask_grad()

    @torch.no_grad()
    def restore(self) -> None:
        """Give frozen entries their bits back after a step."""
        for group in self._grouped():
            values = [real(freeze.parameter.detach()) for freeze in group.freezes]
            for value in values if self.finite else ():
                value.nan_to_num_(nan=0.0, posinf=LARGE, neginf=-LARGE)
            group.restore(values)
        if not self.groups:
            for freeze in self.freezes:
                freeze.restore(finite=self.finite)
        self.note()

    def _grouped(self) -> list[Group]:
        """Return the frozen weights in groups, if their device is one on which that is quicker; otherwise none."""
        if self.freezes and self.device != (device := self.freezes[0].parameter.device):
            self.device, self.groups = device, []
            if device.type in TOGETHER and len({freeze.parameter.device for freeze in self.freezes}) == 1:
                kinds = sorted({freeze.integer for freeze in self.freezes}, key=str)
                self.groups = [_group([f for f in self.freezes if f.integer == kind]) for kind in kinds]
        return self.groups

    @torch.no_grad()
    def restore_if_changed(self, done: int) -> None:
        """Restore the bits if they were changed since `note`.

        Args:
            done: how many steps have been made.
        """
        if done != self.compared and (done <= FIRST or done % EVERY == 0):
            self.compared = done
            self.always = self.always or any(map(_differs, self.freezes))
        if self.always or [freeze.parameter._version for freeze in self.freezes] != self.versions:
            for freeze in self.freezes:
                _restore(freeze)
            self.note()


def check_dense(freeze: Freeze) -> None:
    """Raise an error if the gradient of a parameter is sparse."""
    grad = freeze.parameter.grad
    if grad is not None and grad.layout is not torch.strided:
        raise ValueError("a weight of the backbone has a sparse gradient, which can't be masked: nn.Embedding(sparse=False)")


def _group(freezes: list[Freeze]) -> Group:
    return Group(freezes, [(freeze.free & 1).to(freeze.integer) for freeze in freezes], [f.frozen_bits for f in freezes])


def _bits(values: Tensor | None, freeze: Freeze) -> Tensor:
    assert values is not None
    return real(values).view(freeze.integer)


def _differs(freeze: Freeze) -> bool:
    values = real(freeze.parameter.data).view(freeze.integer)
    return not torch.equal(values & ~freeze.free, freeze.frozen_bits)


def _restore(freeze: Freeze) -> None:
    """Write by way of `.data`: a version that grows would make a backward pass through an earlier pass impossible."""
    real(freeze.parameter.data).view(freeze.integer).bitwise_and_(freeze.free).bitwise_or_(freeze.frozen_bits)
