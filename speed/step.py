"""A method's step against plain SGD's, interleaved in one run: python -m speed.step [--network alexnet] [--methods hat].

Measured while the second task is learned, when the first one holds its weights. Batch 64, float32, 32x32x3 random images.
"""

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hatrack import METHODS, NETWORKS, Method, Network, Regime, Task, Trainer
from hatrack.methods.fit import FitResult
from hatrack.seeds import seeded

BATCH = 64


def random_task(index: int, shape: tuple[int, ...], images: int = 20 * BATCH, classes: int = 10) -> Task:
    draw = torch.Generator().manual_seed(index)
    x, y = torch.randint(0, 256, (images, *shape), dtype=torch.uint8, generator=draw), torch.arange(images) % classes
    return Task.from_arrays(index, f"noise {index}", x, y, x, y, valid=0.0)


def prepare(name: str, network: str, tasks: list[Task]) -> Method:
    """A method that has learned the first task."""
    with seeded(0, "weights"):
        trunk = NETWORKS[network](tasks[0].shape)
    method = METHODS[name](Network(trunk, [task.classes for task in tasks], tasks[0].train.inputs(torch.arange(2))))
    method.learn(tasks[0], Trainer(Regime(epochs=1)))
    return method


def together(
    methods: list[Method], task: Task, rounds: int, clock: Callable[[], float] = time.perf_counter
) -> list[list[float]]:
    """Seconds per step of every method, in turns, each inside its own `learn` of the task."""
    return in_turns(methods, [task] * len(methods), rounds, clock)


def in_turns(
    methods: list[Method],
    tasks: list[Task],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
    batch: int = BATCH,
) -> list[list[float]]:
    """Seconds per step of every method, in turns, each inside its own `learn` of its own task, in the first fit of it."""
    turns = Turns(methods, tasks, rounds, clock, batch)
    with contextlib.suppress(Measured):
        turns.begin_next()
    return turns.seconds


class Measured(Exception):  # noqa: N818
    """The clock has stopped: no task is learned to its end, and every method is rolled back."""


class Turns:
    """A fit that begins the fits of all methods, one within the other, and then lets their steps take turns."""

    def __init__(
        self, methods: list[Method], tasks: list[Task], rounds: int, clock: Callable[[], float], batch: int
    ) -> None:
        self.waiting, self.rounds, self.clock = list(zip(methods, tasks, strict=True)), rounds, clock
        self.regime = Regime(batch=batch)
        self.steps: list[Callable[[Tensor, Tensor], object]] = []
        self.seconds: list[list[float]] = [[] for _ in methods]

    def begin_next(self) -> None:
        """Let the next method learn its task; after the last one, measure."""
        if not self.waiting:
            self._measure()
            raise Measured
        method, task = self.waiting.pop(0)
        method.learn(task, self)

    def __call__(self, method: Method, task: Task, **how: Any) -> FitResult:
        loop = Trainer(self.regime, engine="eager").start(method, task, **how)
        self.steps.append(loop.step)
        method.train()
        self.begin_next()
        return loop.result

    def _measure(self) -> None:
        index = torch.arange(self.regime.batch)
        for turn in range(-2, self.rounds):
            for k, step in enumerate(self.steps):
                start = self.clock()
                step(index, torch.full((), turn % 2))
                if turn >= 0:  # the first two rounds warm up
                    self.seconds[k].append(self.clock() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", default="alexnet", choices=sorted(NETWORKS))
    parser.add_argument("--methods", default="hat", help="by commas")
    parser.add_argument("--rounds", type=int, default=60)
    words = parser.parse_args()
    tasks = [random_task(k, (3, 32, 32)) for k in range(2)]
    names = ["sgd", *words.methods.split(",")]
    seconds = together([prepare(name, words.network, tasks) for name in names], tasks[1], words.rounds)
    medians = [statistics.median(times) for times in seconds]
    print(f"{words.network}, batch {BATCH}, {torch.get_num_threads()} threads, medians of {words.rounds} steps in turns")
    for name, median in zip(names, medians, strict=True):
        print(f"{name:12s} {1e3 * median:8.1f} ms   {median / medians[0]:.2f} times the step of sgd")


if __name__ == "__main__":
    main()
