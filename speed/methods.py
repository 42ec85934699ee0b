"""The step of every method against that of plain SGD, on four networks: python -m speed.methods [--networks vit].

On the CPU, eager, one thread, in processor time, while the second task is learned (in the first fit of it). A method and
plain SGD take turns; the ratio is the median over the turns. Images are random, 32x32x3; "no" is a network that a method
can't follow. Batches are small, so that it ends in some minutes: what a method does to every weight, or to the examples of a
memory, does not shrink with them, so that its ratio is larger than with batches of 64.
"""

import argparse
import statistics
import time
from functools import cache
from pathlib import Path

import torch

from hatrack import METHODS, NETWORKS, Method, Network, Regime, Task, Trainer
from hatrack.seeds import seeded
from speed.step import in_turns, random_task

NETWORKS_SHOWN = ("mlp", "alexnet", "resnet18", "vit")
SHAPE, SMALL = (3, 32, 32), 16
WITHOUT = ("sgd", "random")  # what all are compared with; and a method without steps


@cache
def prepared(name: str, network: str, batch: int) -> Method:
    """A method that has learned an epoch of the first task. What is measured is rolled back, so that it may serve again."""
    tasks = noise(batch)
    with seeded(0, "weights"):
        net = Network(NETWORKS[network](SHAPE), tasks=tasks)
    method = METHODS[name](net)
    method.learn(tasks[0], Trainer(Regime(epochs=1, batch=batch, lr=0.001), engine="eager", progress=False))
    return method


def noise(batch: int) -> list[Task]:
    """Two tasks of two batches each."""
    return [random_task(k, SHAPE, 2 * batch) for k in range(2)]


def measure(name: str, network: str, rounds: int, batch: int) -> str:
    """How many times as long as the step of plain SGD that of a method takes; or "no", if it refuses the network."""
    try:
        method = prepared.__wrapped__(name, network, batch)
    except ValueError:
        return "no"
    plain, own = in_turns([prepared("sgd", network, batch), method], [noise(batch)[1]] * 2, rounds, time.process_time, batch)
    return f"{statistics.median(b / a for a, b in zip(plain, own, strict=True)):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=",".join(NETWORKS_SHOWN), help="by commas")
    parser.add_argument("--methods", default=",".join(name for name in METHODS if name not in WITHOUT), help="by commas")
    parser.add_argument("--batch", type=int, default=SMALL)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="a file to which the table is written as well")
    words = parser.parse_args()
    torch.set_num_threads(1)
    networks = words.networks.split(",")
    lines = [f"| method | {' | '.join(networks)} |", "|---" * (1 + len(networks)) + "|"]
    print("\n".join(lines), flush=True)
    for name in words.methods.split(","):
        cells = [measure(name, network, words.rounds, words.batch) for network in networks]
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
        if words.out:
            words.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
