"""What rounding does to HAT: from s e = 17 on a gate is 1 in float32 and has no gradient, where the formula has one.

python -m dev.hat_in_float32    # the share of units open after the first task of the sample of split MNIST, at five seeds
"""

import statistics

import hatrack as hr
from hatrack import BENCHMARKS, HAT, Network, Regime, Trainer
from hatrack.networks.mlp import mlp
from hatrack.seeds import seeded


def run(seed: int, slope: str) -> tuple[float, float]:
    """Learn the first task; return the accuracy and the share of units that are open."""
    task = BENCHMARKS["smnist"](0, data="sample")[0]
    with seeded(seed, "weights"):
        trunk = mlp(task.shape, widths=(100, 100), dropout=0.0, input_dropout=0.0)
    method = HAT(Network(trunk, tasks=[task], seed=seed), slope=slope)
    method.learn(task, Trainer(Regime(epochs=8, batch=32, lr=0.1), seed=seed, progress=False, engine="eager"))
    return hr.evaluate(method, task.test).accuracy, method.final_gates(0).float().mean().item()


if __name__ == "__main__":
    for slope in ("rounded", "exact"):
        found = zip(*(run(seed, slope) for seed in range(5)), strict=True)
        for name, values in zip(("accuracy", "units open"), found, strict=True):
            mean, std = 100 * statistics.mean(values), 100 * statistics.stdev(values)
            print(f"{slope}, {name}: {mean:.1f} ± {std:.1f} %")
