"""The time of evaluations after a task, in turns: python -m speed.evaluation [--device cuda] [--network mlp] [--method hat].

A row of the matrices is the test data of all tasks and 2,000 training images of each. It is measured split by split with a
read-back after each, as a loop over `evaluate` does it; at once with one read-back, as a run does it; on a GPU also recorded
(the first call, with its warm-up and recording, and later ones). Then the accuracy without a task id, by a forward pass per
task and as a run computes it. Random images, an untrained network; the sizes are pmnist's for `mlp`, cifar's for others.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from hatrack import METHODS, NETWORKS, Method, Network, Split, Task, evaluate
from hatrack.engine.recorded import Recorded, own_stream
from hatrack.methods import evaluate as evaluation
from hatrack.methods.evaluate import Evaluations, without_task_ids
from hatrack.seeds import seeded
from hatrack.tasks.device import all_to_device

EXAMPLES = 2000  # training images of a task on which a run measures the loss


def prepare(name: str, network: str, count: int, device: torch.device) -> tuple[Method, list[Split], list[Split]]:
    """Return an untrained method, and the test data and some training data of its tasks."""
    shape, size, classes = ((1, 28, 28), 10_000, 10) if network == "mlp" else ((3, 32, 32), 2000, 20)
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, 256, (size, *shape), dtype=torch.uint8, generator=draw), torch.arange(size) % classes
    tasks = [Task.from_arrays(k, f"noise {k}", x, y, x, y, valid=0.0) for k in range(count)]
    with seeded(0, "weights"):
        trunk = NETWORKS[network](shape)
    method = METHODS[name](Network(trunk, tasks=tasks)).to(device)
    tasks = all_to_device(tasks, device)
    return method, [t.test for t in tasks], [t.train.part(torch.arange(EXAMPLES, device=device)) for t in tasks]


@torch.no_grad()
def pass_per_task(method: Method, splits: list[Split]) -> list[float]:
    """The accuracy without a task id, by a forward pass per task and a read-back per data set."""
    found, tasks, method = [], range(len(splits)), method.eval()
    for split in splits:
        right = torch.zeros((), dtype=torch.int64, device=split.y.device)
        for index in torch.split(torch.arange(len(split), device=split.y.device), evaluation.BATCH):
            x = split.inputs(index)
            best = [method(x, task).max(1) for task in tasks]
            winner = torch.stack([value for value, _ in best]).argmax(0)
            answer = torch.stack([label for _, label in best]).gather(0, winner[None])[0]
            right += ((answer == split.y[index]) & (winner == split.task)).sum()
        found.append(right.item() / len(split))
    return found


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """On a CPU the processor time, which other work on the machine hardly disturbs."""
    if device.type == "cpu":
        start = time.process_time()
        work()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--network", default="alexnet", choices=sorted(NETWORKS))
    parser.add_argument("--method", default="hat", choices=sorted(METHODS))
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    words = parser.parse_args()
    device = torch.device(words.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    method, tests, trains = prepare(words.method, words.network, words.tasks, device)
    row = [*tests, *trains]
    work: dict[str, Callable[[], object]] = {
        "a row, split by split": lambda: [evaluate(method, split) for split in row],
        "a row, at once": lambda: Evaluations(method, row)(),
    }
    if device.type == "cuda":
        recorded = Evaluations(method, row, wrap=Recorded)
        work["a row, recorded for itself"] = lambda: Evaluations(method, row, wrap=Recorded)()
        work["a row, recorded before"] = recorded
    work["without a task id, a pass per task"] = lambda: pass_per_task(method, tests)
    work["without a task id"] = lambda: without_task_ids(method, tests, range(len(tests)))
    found: dict[str, list[float]] = {name: [] for name in work}
    with own_stream(device):
        for turn in range(-2 if device.type == "cuda" else 0, words.rounds):
            for name, function in work.items():
                took = seconds(function, device)
                if turn >= 0:  # on a GPU two rounds warm up
                    found[name].append(took)
    first = statistics.median(found["a row, split by split"])
    print(f"{words.method} on {words.network}, {words.tasks} tasks, {device}")
    for name, times in found.items():
        print(f"{name:36s} {1e3 * statistics.median(times):9.1f} ms {statistics.median(times) / first:7.3f}")


if __name__ == "__main__":
    main()
