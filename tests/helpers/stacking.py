"""Several small methods that learn tasks at the same time, stacked or each alone."""

from collections.abc import Callable, Sequence

import torch

from hatrack import Method, Task, Trainer
from hatrack.engine.interleaving import run_interleaved
from hatrack.tasks.device import all_to_device
from tests.helpers.learning import logits

Make = Callable[[int], tuple[Method, list[Task], Trainer]]  # a run by its seed


class Learned:
    """A run: the method, the answers to each task when it was learned, and the engines of the fits."""

    def __init__(self, make: Make, seed: int, device: str = "cpu") -> None:
        method, tasks, fit = make(seed)
        tasks, self.method, self.fit = all_to_device(tasks, device), method.to(device), fit
        self.first = []
        for task in tasks:
            self.method.learn(task, fit)
            self.first.append(logits(self.method, task).cpu())
        self.last = [logits(self.method, task).cpu() for task in tasks]

    @property
    def engines(self) -> set[str]:
        return {result.engine for result in self.fit.fits}

    @property
    def losses(self) -> list[float]:
        return [epoch.loss for result in self.fit.fits for epoch in result.epochs]

    def forgets(self) -> bool:
        """Whether any answer changed, by any bit."""
        return not all(torch.equal(one, two) for one, two in zip(self.first, self.last, strict=True))


def alone_and_stacked(
    make: Make, seeds: Sequence[int] = (0, 1, 2), device: str = "cpu", workers: int | None = None
) -> tuple[list[Learned], list[Learned]]:
    """The same runs each alone, and stacked."""
    alone = [Learned(make, seed, device) for seed in seeds]
    runs = [lambda seed=seed: Learned(make, seed, device) for seed in seeds]
    return alone, run_interleaved(runs, torch.device(device), workers or len(seeds), stack=True)


def assert_close(alone: list[Learned], stacked: list[Learned], tolerance: float = 1e-4) -> None:
    """The same losses of epochs and the same answers, to rounding, by runs that were stacked indeed."""
    for one, two in zip(alone, stacked, strict=True):
        assert all("stacked" in engine for engine in two.engines), two.engines
        assert len(one.losses) == len(two.losses)
        torch.testing.assert_close(torch.tensor(one.losses), torch.tensor(two.losses), rtol=tolerance, atol=tolerance)
        for mine, other in zip(one.last, two.last, strict=True):
            torch.testing.assert_close(mine, other, rtol=10 * tolerance, atol=10 * tolerance)
