"""Compare the kinds of a router: HAT learns a benchmark once per seed, and every kind looks for the tasks of test images.

python docs/examples/router_kinds.py smnist --tasks 5 --epochs 6 --seeds 3
"""

import argparse

import torch

import hatrack as hr
from hatrack.experiments.routing import routed
from hatrack.methods.evaluate import without_task_ids
from hatrack.methods.router import KINDS


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def results(benchmark: str, options: dict[str, object], seed: int, epochs: int) -> dict[str, float]:
    """Return the mean accuracy over all tasks with the task id, by the best logit of all heads, and by every kind."""
    tasks = hr.BENCHMARKS[benchmark](seed, **options)
    torch.manual_seed(seed)
    trunk = hr.NETWORKS["mlp"](tasks[0].shape, widths=(400, 400), dropout=0.2, input_dropout=0.0)
    method = hr.HAT(hr.Network(trunk, tasks=tasks, seed=seed))
    fit = hr.Trainer(hr.Regime(epochs=epochs, optimizer="adam", lr=0.001, batch=128), seed=seed, progress=False)
    for task in tasks:
        method.learn(task, fit)
        method.fit_router(task)
    tests = [task.test for task in tasks]
    found = {
        "task id": mean([hr.evaluate(method, test).accuracy for test in tests]),
        "best logit": mean(without_task_ids(method, tests, range(len(tasks)))),
    }
    return found | {kind: mean(routed(method, tests, kind).accuracy) for kind in KINDS}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the kinds of a router.")
    parser.add_argument("benchmark")
    parser.add_argument("--tasks", type=int, help="the option of smnist")
    parser.add_argument("--data", help="the option of benchmarks that have a sample")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    options = {name: value for name in ("tasks", "data") if (value := getattr(given, name)) is not None}
    rows = [results(given.benchmark, options, seed, given.epochs) for seed in range(given.seeds)]
    for name in rows[0]:
        closed = mean([(row[name] - row["best logit"]) / (row["task id"] - row["best logit"]) for row in rows])
        values = ", ".join(f"{100 * row[name]:.1f}" for row in rows)
        print(f"{name:10}  {100 * mean([row[name] for row in rows]):5.1f} %  gap closed {100 * closed:4.0f} %  ({values})")


if __name__ == "__main__":
    main()
