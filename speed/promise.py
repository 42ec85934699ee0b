"""What the promise costs on the CPU, with eager steps, all in one run: python -m speed.promise [--rounds 15].

First the construction of a method (for hat this is mostly tracing) and the steps of hat and pmask against those of plain
SGD, in turns and in processor time, while the second task is learned. Then predictions from several threads: every one must
be right and the model unchanged; their number per second is compared with that of one thread, by `predict` and by modules of
`for_task`.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hatrack import METHODS, NETWORKS, Method, Network, Regime, Task, Trainer
from hatrack.seeds import seeded
from speed.step import BATCH, random_task, together

ASKED = {("resnet18", "hat"): 1.3, ("alexnet", "pmask"): 1.6}  # times the step of plain SGD, at most
SERVED = ("hat", "pmask", "packnet", "pnn", "independent")
IMAGES = 8  # in one prediction


@dataclass(frozen=True)
class Cost:
    """What a method costs on a network: seconds of its construction and of a step, and the step against plain SGD's."""

    network: str
    method: str
    construction: float
    step: float
    ratio: float  # the median over the turns, each with its counterpart

    @property
    def asked(self) -> float | None:
        """The ratio that is asked for, at most."""
        return ASKED.get((self.network, self.method))


def few_images(task: Task) -> Task:
    """Return a task with four batches: statistics of norms are computed from all of its images."""
    return replace(task, train=task.train.part(torch.arange(4 * BATCH)))


def construct(name: str, network: str, tasks: list[Task]) -> tuple[Method, float]:
    """Return a method that has learned one epoch of the first task, and the seconds of its construction."""
    with seeded(0, "weights"):
        net = Network(NETWORKS[network](tasks[0].shape), tasks=tasks)
    start = time.process_time()
    method = METHODS[name](net)
    seconds = time.process_time() - start
    method.learn(tasks[0], Trainer(Regime(epochs=1), engine="eager"))
    return method, seconds


def costs(network: str, names: list[str], rounds: int) -> list[Cost]:
    """Measure methods against plain SGD, which is the first of the results."""
    tasks, names = [few_images(random_task(k, (3, 32, 32))) for k in range(2)], ["sgd", *names]
    methods, constructions = zip(*(construct(name, network, tasks) for name in names), strict=True)
    seconds = together(list(methods), tasks[1], rounds, time.process_time)
    ratios = [statistics.median(a / b for a, b in zip(times, seconds[0], strict=True)) for times in seconds]
    rows = zip(names, constructions, seconds, ratios, strict=True)
    return [Cost(network, name, made, statistics.median(times), ratio) for name, made, times, ratio in rows]


@dataclass(frozen=True)
class Served:
    """Predictions of one method: how many were wrong, whether the model changed, and how many there were per second."""

    method: str
    wrong: int
    changed: int
    one: float  # predictions per second by one thread
    many: float  # by several
    modules: float  # by several, of modules of `for_task`


def serve(name: str, calls: int, threads: int) -> Served:
    """Learn two tasks on a small network, then predict from one thread and from several."""
    tasks = [random_task(k, (1, 8, 8)) for k in range(2)]
    with seeded(0, "weights"):
        net = Network(NETWORKS["mlp"]((1, 8, 8), widths=(64, 64)), tasks=tasks)
    method = METHODS[name](net)
    for task in tasks:
        method.learn(task, Trainer(Regime(epochs=1), engine="eager"))
    images = [task.test.x[:IMAGES] for task in tasks]
    seen = [task.test.inputs(torch.arange(IMAGES)) for task in tasks]
    models = [method.for_task(k) for k in range(2)]
    right, logits = [method.predict(x, k) for k, x in enumerate(images)], [models[k](x) for k, x in enumerate(seen)]
    state = {key: value.clone() for key, value in method.state_dict().items()}
    one, _ = ask(lambda k: method.predict(images[k], k), right, calls // threads, 1)
    many, wrong = ask(lambda k: method.predict(images[k], k), right, calls, threads)
    modules, also = ask(lambda k: models[k](seen[k]), logits, calls, threads)
    changed = sum(not torch.equal(value, state[key]) for key, value in method.state_dict().items())
    return Served(name, wrong + also, changed, one, many, modules)


@torch.no_grad()
def ask(answer: Callable[[int], Tensor], right: list[Tensor], calls: int, threads: int) -> tuple[float, int]:
    """Ask for the answers to both tasks in turn. Return how many there were per second, and how many were wrong."""

    def check(number: int) -> bool:
        with torch.no_grad():  # of this thread
            return torch.equal(answer(number % 2), right[number % 2])

    start = time.perf_counter()
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        wrong = calls - sum(pool.map(check, range(calls)))
    return calls / (time.perf_counter() - start), wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default="resnet18,alexnet,vit", help="by commas; none: no steps are measured")
    parser.add_argument("--methods", default="hat,pmask", help="by commas")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=10_000, help="predictions; 0: none are measured")
    parser.add_argument("--threads", type=int, default=8)
    words = parser.parse_args()
    torch.set_num_threads(1)
    print(f"batch {BATCH}, float32, eager, 1 thread, medians of {words.rounds} steps in turns, processor time")
    for network in filter(None, words.networks.split(",")):
        for cost in costs(network, words.methods.split(","), words.rounds):
            asked = "" if cost.asked is None else f"   asked: at most {cost.asked}"
            times = f"construction {cost.construction:6.2f} s   step {1e3 * cost.step:8.1f} ms"
            print(f"{network:10s} {cost.method:8s} {times}   {cost.ratio:5.2f} times sgd{asked}", flush=True)
    for name in SERVED if words.calls else ():
        found = serve(name, words.calls, words.threads)
        rates = f"{found.one:7.0f}/s by 1 thread, {found.many:7.0f}/s by {words.threads}, {found.modules:7.0f}/s by for_task"
        wrong = f"{words.calls:,} predictions and as many of for_task: {found.wrong} wrong, {found.changed} tensors changed"
        print(f"{name:12s} {wrong}; {rates}", flush=True)


if __name__ == "__main__":
    main()
