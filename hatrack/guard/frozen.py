"""Weights of finished tasks that a loop changes between two steps have their bits back before the next forward pass."""

from collections.abc import Sequence

import torch

from hatrack.methods.parts.freeze import Freeze, real

FIRST, EVERY = 3, 64  # the steps after which the bits are compared: the first few, and then every so many


class FrozenBits:
    """Restores frozen weights that something else than a step has changed, as by clamping or rescaling all weights.

    A step restores them as well, but the forward passes before it would compute with other weights than the task will have.
    The versions that torch counts show most changes at no cost. They do not show those by way of `.data`, so that after some
    steps the bits are compared. Once such a change was found, every forward pass restores the bits.

    Args:
        freezes: what is frozen, by parameter.
    """

    def __init__(self, freezes: Sequence[Freeze]) -> None:
        self.freezes = [freeze for freeze in freezes if not freeze.empty]
        self.always, self.compared = False, 0
        self.note()

    def note(self) -> None:
        """Note that the frozen weights have their bits now."""
        self.versions = [freeze.parameter._version for freeze in self.freezes]

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


def _differs(freeze: Freeze) -> bool:
    values = real(freeze.parameter.data).view(freeze.integer)
    return not torch.equal(values & ~freeze.free, freeze.frozen_bits)


def _restore(freeze: Freeze) -> None:
    """Write by way of `.data`: a version that grows would make a backward pass through an earlier pass impossible."""
    real(freeze.parameter.data).view(freeze.integer).bitwise_and_(freeze.free).bitwise_or_(freeze.frozen_bits)
