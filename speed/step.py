"""A method's step against plain SGD's, interleaved in one run: python -m speed.step [--network alexnet] [--methods hat].

Measured while the second task is learned, when the first one holds its weights. Batch 64, float32, 32x32x3 random images.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from hatrack import METHODS, NETWORKS, Method, Network, Regime, Task, Trainer
from hatrack.seeds import seeded

BATCH = 64


def random_task(index: int, shape: tuple[int, ...]) -> Task:
    draw = torch.Generator().manual_seed(index)
    x = torch.randint(0, 256, (20 * BATCH, *shape), dtype=torch.uint8, generator=draw)
    return Task.from_arrays(index, f"noise {index}", x, torch.arange(len(x)) % 10, x, torch.arange(len(x)) % 10, valid=0.0)


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
    methods: list[Method], tasks: list[Task], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> list[list[float]]:
    """Seconds per step of every method, in turns, each inside its own `learn` of its own task."""
    steps, seconds = [], [[] for _ in methods]

    def fit(method: Method, task: Task, **how: object) -> None:
        steps.append(Trainer(Regime()).start(method, task, **how).step)
        method.train()
        if (number := len(steps)) < len(methods):
            methods[number].learn(tasks[number], fit)
            return
        for turn in range(-2, rounds):
            index, place = torch.arange(BATCH), torch.full((), turn % (len(task.train) // BATCH))
            for k, step in enumerate(steps):
                start = clock()
                step(index, place)
                if turn >= 0:  # the first two rounds warm up
                    seconds[k].append(clock() - start)

    methods[0].learn(tasks[0], fit)
    return seconds


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
