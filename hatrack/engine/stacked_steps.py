"""The steps of one fit as steps of a stack, where the runs of a command are stacked."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from hatrack.engine.interleaving import lane_count, stacking, stand_apart, step_done, wait_together
from hatrack.engine.padding import Padding, padded
from hatrack.engine.recorded import Recorded
from hatrack.engine.stack import Member, Stack
from hatrack.engine.stacked_form import RunStep, find_form
from hatrack.tasks.batches import split_batches
from hatrack.tasks.split import Split

AHEAD = 16  # steps of a run that may wait to be done
FEW = 8  # places of a stack that are kept even if most of them are empty: they cost less than to make a smaller stack


class StackedSteps:
    """Does full batches of a fit in a stack, together with those of other runs, and other batches alone.

    A step that it was asked for is done at `flush` at the latest. Before that nobody may read or change what the step uses.

    Args:
        step: the step on what was fetched of a batch.
        alone: the step of this run alone, on the numbers of the batch's examples and the number of the batch.
        split: the data.
        size: how many examples a full batch has.
        record: whether steps are recorded.

    Attributes:
        wait_for_code: called with a number of lanes before a stack is joined, so that another process may compile its step.
            It may raise an exception to stop the run.
    """

    def __init__(
        self, step: RunStep, alone: Callable[[Tensor, Tensor], Tensor], split: Split, size: int, *, record: bool
    ) -> None:
        self.step, self.alone, self.split, self.size, self.record = step, alone, split, size, record
        self.member: Member | None = None
        self.epoch: tuple[Tensor, int] | None = None  # the examples of an epoch that is not listed yet, and where it begins
        self.entered = self.apart = False
        self.wait_for_code: Callable[[int], None] | None = None
        self.failed = "images in the host's memory" if split.on_host or split.stream else ""

    def begin_epoch(self, order: Tensor, batch: int, first: int) -> None:
        """Note the order of an epoch's examples and the number of its first batch.

        If most runs of the stack have ended, this one goes on in a smaller one: a place without a run costs as much as one
        with a run.
        """
        if self.member is not None:
            places = self.member.stack.form.lanes
            if places > FEW and 2 * lane_count() <= places:
                self._leave(self.member)
                if isinstance(self.alone, Recorded):
                    self.alone.forget()
        full = [part for part in split_batches(order, batch) if len(part) == self.size]
        self.epoch = torch.stack(full) if full else order.new_zeros(0, self.size), first

    def __call__(self, index: Tensor, number: Tensor) -> Tensor | None:
        """Do a step, now or later."""
        if len(index) != self.size or not self._joined(index, number):
            self.flush()
            result = self.alone(index, number)
            step_done()
            return result
        member = self.member
        assert member is not None
        if not self.entered:
            self._enter(member)
        member.pending += 1
        if member.pending >= AHEAD:
            self._wait(member)
        return None

    def _joined(self, index: Tensor, number: Tensor) -> bool:
        """Join a stack, unless that was tried before. Return False if the steps can't be stacked."""
        if self.member is not None or self.apart:
            return self.member is not None
        lanes = lane_count()
        if self.wait_for_code and not self.failed:
            self.wait_for_code(lanes)
        try:
            if self.failed:
                raise RuntimeError(self.failed)
            self._join(self._inputs(index, number), self.step.paddings(), lanes)
        except Exception as error:  # it may fail in many ways; the step can always run alone
            self.failed = (str(error).splitlines() or [type(error).__name__])[0]
            warnings.warn(f"steps are not stacked and run side by side: {self.failed}", stacklevel=4)
            self.apart = True
            stand_apart(apart=True)
        return self.member is not None

    def _inputs(self, index: Tensor, number: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs of the step on a batch."""
        return *self.split.fetch(index), number.clone()

    def make_form(self, index: Tensor, number: Tensor, lanes: int, *, padded_too: bool) -> None:
        """Make the form of the step as it is in a stack, without a stack: in a helper, which leaves its code on disk.

        Args:
            index: the numbers of the examples of a full batch.
            number: the number of the batch.
            lanes: how many places the stack has.
            padded_too: whether tensors may get more rows, as in `_join`.
        """
        inputs = self._inputs(index, number)
        if padded_too:
            with suppress(Exception), padded(self.step.paddings()):
                find_form(self.step, inputs, lanes)
                return
        find_form(self.step, inputs, lanes)

    def _join(self, inputs: tuple[Tensor, ...], paddings: Sequence[Padding], lanes: int) -> None:
        stacks, form, stack = stacking(), None, None
        assert stacks is not None
        try:
            with padded(paddings):
                form, tensors = find_form(self.step, inputs, lanes)
                stack = next((each for each in stacks if each.form is form and each.has_place), None)
                if stack is None:  # with more rows, as they are now
                    stack = Stack(form, inputs, tensors, record=self.record)
                    stacks.append(stack)
        except Exception:  # a step may need its tensors as they are
            if not paddings or form is not None:
                raise
        if form is None:  # not above, where the error still holds what the step has computed with more rows
            self._join(inputs, (), lanes)
            return
        fills = {id(padding.tensor): padding.fill for padding in paddings}
        assert stack is not None
        try:
            self.member = stack.join(tensors, self.split.x, fills)
        finally:
            self._drop_if_empty(stack)

    def _enter(self, member: Member) -> None:
        """Hand the lane over to the stack; at the beginning of an epoch, with the list of its examples."""
        if self.epoch is not None:
            order, first = self.epoch
            task = [self.split.task] if isinstance(self.split.task, Tensor) else []
            crops = [] if self.split.crops is None else [self.split.crops]
            parts = [of[order] for of in (self.split.rows, self.split.y, *task, *crops)]
            member.stack.list_epoch(member, parts, first)
            self.epoch = None
        member.stack.enter(member)
        self.entered = True

    def _wait(self, member: Member) -> None:
        """Wait until the steps are done; when all runs wait, those of all stacks are done."""

        def drive() -> None:
            for stack in list(stacking() or ()):
                stack.drive()

        wait_together(lambda: not member.pending or member.stack.error is not None, drive)
        if member.pending and member.stack.error is not None:
            raise RuntimeError(f"a stacked step failed: {member.stack.error}") from member.stack.error

    def flush(self) -> None:
        """Wait until all steps are done that were asked for."""
        if self.entered and self.member is not None:
            self._wait(self.member)
            self.member.stack.exit(self.member)
            self.entered = False

    def close(self) -> None:
        """Leave the stack. Steps that are not done yet are dropped."""
        if self.apart:
            stand_apart(apart=False)
            self.apart = False
        if self.member is not None:
            self.member.pending = 0
            self._leave(self.member)

    def _leave(self, member: Member) -> None:
        """Leave the stack."""
        self.flush()
        member.stack.leave(member)
        self._drop_if_empty(member.stack)
        self.member = None

    @staticmethod
    def _drop_if_empty(stack: Stack) -> None:
        """Free the memory of a stack without runs for others."""
        stacks = stacking()
        if not stack.members and stacks is not None and stack in stacks:
            stacks.remove(stack)
