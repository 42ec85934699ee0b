"""What a step costs after many tasks, for every method: python -m speed.many_tasks [--tasks 2,10,100] [--methods hat,ewc].

Methods of a kind take turns: each has learned all tasks but the last of its number, and learns that one. Random images, a
perceptron, eager steps, one thread, processor time. `--widths` measures wider perceptrons as well, each by itself. Methods
whose papers let the work of a step grow with the tasks get no verdict: `GROW` says why.
"""

import argparse
import statistics
import time

import torch

from hatrack import METHODS, NETWORKS, Method, Network, Regime, Task, Trainer
from hatrack.seeds import seeded
from speed.step import BATCH, in_turns, random_task

ASKED = 1.1  # times the step of the second task, at most
GROW = {  # whose step does more with every task, by the method itself
    "joint": "a batch mixes the data of all tasks so far, and so it needs all their heads",
    "lwf": "a distillation term for the head of every earlier task (Li and Hoiem 2016, the loss L_old)",
    "pnn": "a column reads the features of the columns of all earlier tasks (Rusu et al. 2016)",
    "den": "units are added with every task (Yoon et al. 2018)",
}
SHAPE, CLASSES = (1, 8, 8), 5


def noise(index: int) -> Task:
    """A task of two batches of random images."""
    return random_task(index, SHAPE, 2 * BATCH, CLASSES)


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


def growth(name: str, counts: list[int], widths: tuple[int, ...], rounds: int) -> tuple[float, list[float]]:
    """Return the seconds of a step at the first number of tasks, and how many times as long it takes at every other."""
    methods = [after(name, count - 1, widths) for count in counts]
    first, *others = in_turns(methods, [noise(count - 1) for count in counts], rounds, time.process_time)
    ratios = [statistics.median(b / a for a, b in zip(first, times, strict=True)) for times in others]
    return statistics.median(first), ratios


def verdict(name: str, ratio: float) -> str:
    """What is to be said of the last ratio."""
    return f"grows: {GROW[name]}" if name in GROW else "reached" if ratio <= ASKED else "MISSED"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tasks", default="2,100", help="numbers of tasks by commas; the first is what others are compared with"
    )
    parser.add_argument("--methods", default=",".join(name for name in METHODS if name != "random"), help="by commas")
    parser.add_argument("--widths", default="100,100", help="of the layers, by commas; several networks by semicolons")
    parser.add_argument("--rounds", type=int, default=60)
    words = parser.parse_args()
    torch.set_num_threads(1)
    counts = [int(number) for number in words.tasks.split(",")]
    print(f"a step of task {words.tasks}, batch {BATCH}, medians of {words.rounds} steps in turns\n")
    print("| method | widths | task " + " | task ".join(map(str, counts)) + " | |")
    print("|---" * (3 + len(counts)) + "|", flush=True)
    for name in words.methods.split(","):
        for widths in words.widths.split(";"):
            first, ratios = growth(name, counts, tuple(map(int, widths.split(","))), words.rounds)
            cells = [name, widths, f"{1e6 * first:.0f} us", *(f"{ratio:.2f}" for ratio in ratios)]
            print("| " + " | ".join([*cells, verdict(name, ratios[-1])]) + " |", flush=True)


if __name__ == "__main__":
    main()
