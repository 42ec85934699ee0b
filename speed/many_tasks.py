"""What a step costs after many tasks, for every method: python -m speed.many_tasks [--tasks 100] [--methods hat,ewc].

Two methods of a kind take turns: one that has learned a single task and one that has learned many, each while it learns its
next task. Random images, a perceptron, eager steps, one thread, processor time. Methods whose network or data grow by design
(`pnn`, `joint`, `den`) get no verdict: their papers say so.
"""

import argparse
import statistics
import time

import torch

from hatrack import METHODS, NETWORKS, Method, Network, Regime, Task, Trainer
from hatrack.seeds import seeded
from speed.step import BATCH, in_turns

ASKED = 1.1  # times the step of the second task, at most
GROW = ("pnn", "joint", "den")  # by design: columns, data or units are added with every task
SHAPE, CLASSES = (1, 8, 8), 5


def noise(index: int) -> Task:
    """A task of two batches of random images."""
    draw = torch.Generator().manual_seed(index)
    x, y = torch.randint(0, 256, (2 * BATCH, *SHAPE), dtype=torch.uint8, generator=draw), torch.arange(2 * BATCH) % CLASSES
    return Task.from_arrays(index, f"noise {index}", x, y, x, y, valid=0.0)


def after(name: str, count: int, widths: tuple[int, ...]) -> Method:
    """Return a method that has learned so many tasks, a single epoch each."""
    with seeded(0, "weights"):
        trunk = NETWORKS["mlp"](SHAPE, widths=widths)
    tasks = [noise(index) for index in range(count + 1)]
    method = METHODS[name](Network(trunk, [CLASSES] * len(tasks), tasks[0].train.inputs(torch.arange(2))))
    fit = Trainer(Regime(epochs=1, batch=BATCH, lr=0.001), progress=False, engine="eager")
    for task in tasks[:-1]:
        method.learn(task, fit)
    return method


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument(
        "--methods", default=",".join(name for name in METHODS if name not in ("random", "lora")), help="by commas"
    )
    parser.add_argument("--widths", default="100,100")
    parser.add_argument("--rounds", type=int, default=60)
    words = parser.parse_args()
    torch.set_num_threads(1)
    widths = tuple(map(int, words.widths.split(",")))
    print(f"task {words.tasks} against task 2: {words.widths}, batch {BATCH}, medians of {words.rounds} steps in turns")
    for name in words.methods.split(","):
        methods = [after(name, count, widths) for count in (1, words.tasks - 1)]
        tasks = [noise(1), noise(words.tasks - 1)]
        few, many = in_turns(methods, tasks, words.rounds, time.process_time)
        ratio = statistics.median(b / a for a, b in zip(few, many, strict=True))
        verdict = "" if name in GROW else "reached" if ratio <= ASKED else "MISSED"
        microseconds = "  ".join(f"{1e6 * statistics.median(times):7.0f} us" for times in (few, many))
        print(f"{name:12s} {microseconds}  {ratio:5.2f}  {verdict}", flush=True)


if __name__ == "__main__":
    main()
