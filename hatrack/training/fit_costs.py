"""The costs of a fit for its record: steps, examples, floating-point operations, memory."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hatrack.engine.compiled import Compiled
from hatrack.methods.fit import FitResult
from hatrack.methods.method import Method
from hatrack.tasks.batches import split_batches
from hatrack.training.counting import count_real_step, count_trial_step, countable, held_bytes, measured_peak, reset_peak
from hatrack.training.fit_optimizers import Optimizers
from hatrack.training.ranks import Ranks


class FitCosts:
    """Counts what the steps of a fit cost, and writes the sums into its result.

    Args:
        method: the method that is trained.
        optimizers: those of the fit, whose state takes memory.
        device: where the steps run.
        result: where the sums are written.
        measure: count operations and measure memory, not only the numbers of steps and examples.
    """

    def __init__(
        self, method: Method, optimizers: Optimizers, device: torch.device, result: FitResult, *, measure: bool
    ) -> None:
        self.method, self.optimizers, self.device, self.result, self.measure = method, optimizers, device, result, measure
        self.flops: dict[int, int | None] = {}  # the operations of a step, by the size of its batch
        result.steps, result.examples, result.flops = 0, 0, 0 if measure else None

    def asks_for(self, size: int) -> bool:
        """Return whether a step with a batch of this size is the first one, which is counted."""
        return self.measure and size not in self.flops

    def count(
        self,
        step: Callable[..., Any],
        inputs: tuple[Tensor, ...],
        size: int,
        ranks: Ranks | None = None,
        *,
        keep: bool = False,
    ) -> None:
        """Do a step, and count its operations. One that is to be recorded runs eagerly at first.

        Args:
            step: the step.
            inputs: its inputs.
            size: the size of its batch.
            ranks: the processes that share it.
            keep: the memory that it takes counts, too.
        """
        self.note_peak()
        if countable(self.method):
            count = count_real_step(step, inputs)
            self.flops[size] = ranks.total(count) if ranks and count is not None else count
        else:
            self.flops[size] = None
            step(*inputs)
        if not keep:
            self.begin()

    def count_compiled(self, compiled: Compiled, inputs: Callable[[], tuple[Tensor, ...]]) -> None:
        """Count the operations of a step that has been compiled; those of another task that took the same code, and has
        tensors of as many rows, serve."""
        known, rows = compiled.code.flops if compiled.code and countable(self.method) else {}, compiled.widened.rows
        if rows not in known:
            self.count_trial(compiled.function, inputs(), compiled.size)
            known[rows] = self.flops[compiled.size]
        self.flops[compiled.size] = known[rows]

    def count_trial(self, step: Callable[..., Tensor], inputs: tuple[Tensor, ...], size: int) -> None:
        """Count the operations of a step that is rolled back: what is compiled or stacked can't be counted itself."""
        self.note_peak()
        self.flops[size] = count_trial_step(step, inputs, self.method) if countable(self.method) else None
        self.begin()

    def begin(self) -> None:
        """Begin to measure the most memory that steps take."""
        if self.measure:
            reset_peak(self.device)

    def note_peak(self) -> None:
        """Update the most memory that the fit took; on a CPU it does not change."""
        if self.measure:
            held = 0 if self.device.type == "cuda" else held_bytes(self.method, self.optimizers.all)
            found = max(self.result.peak_bytes or 0, measured_peak(self.device) or held)
            self.result.peak_bytes = found or None

    def add_up(self, examples: Iterable[int], batch: int) -> None:
        """Write the numbers of steps, examples and operations into the result. They follow from the epochs alone, so that a
        fit which was killed and continued has the same.

        Args:
            examples: how many examples each epoch had.
            batch: the size of a batch.
        """
        sizes = Counter[int]()
        for count, epochs in Counter(examples).items():
            for part in split_batches(torch.arange(count), batch):
                sizes[len(part)] += epochs
        self.result.steps, self.result.examples = sizes.total(), sum(size * number for size, number in sizes.items())
        known = [number * flops for size, number in sizes.items() if (flops := self.flops.get(size)) is not None]
        self.result.flops = sum(known) if len(known) == len(sizes) else None

    def state(self) -> dict[str, int]:
        """Return the operations that are known, for the metadata of a saved state."""
        return {str(size): count for size, count in self.flops.items() if count is not None}

    def load_state(self, state: dict[str, int]) -> None:
        """Take over what a saved state knows."""
        self.flops |= {int(size): count for size, count in state.items()}
