"""What rounding does to HAT: from s e = 17 on a gate is 1 in float32 and has no gradient, where the formula has one.

python -m dev.hat_in_float32    # the share of units open after the first task of the sample of split MNIST, at five seeds
"""

import statistics
from typing import Any

import torch
from torch import Tensor

import hatrack as hr
from hatrack import BENCHMARKS, HAT, Network, Regime, Trainer
from hatrack.methods.parts.annealing import AnnealedGates, compensation
from hatrack.networks.mlp import mlp
from hatrack.seeds import seeded

AS_IT_IS = AnnealedGates.backward


def exact(ctx: Any, grad: Tensor, of_price: Tensor) -> tuple[Tensor | None, ...]:
    """The backward pass of the gates with their slope sigmoid(se) sigmoid(-se), which has no difference that is rounded."""
    e, s, price, _ = ctx.saved_tensors
    slope = torch.sigmoid(s * e) * torch.sigmoid(-s * e) * torch.addcmul(grad, price, of_price)
    return slope * s * compensation(e, s, ctx.smax), None, None, None, None


def run(seed: int) -> tuple[float, float]:
    """Learn the first task; return the accuracy and the share of units that are open."""
    task = BENCHMARKS["smnist"](0, data="sample")[0]
    with seeded(seed, "weights"):
        trunk = mlp(task.shape, widths=(100, 100), dropout=0.0, input_dropout=0.0)
    method = HAT(Network(trunk, tasks=[task], seed=seed))
    method.learn(task, Trainer(Regime(epochs=8, batch=32, lr=0.1), seed=seed, progress=False, engine="eager"))
    return hr.evaluate(method, task.test).accuracy, method.final_gates(0).float().mean().item()


if __name__ == "__main__":
    for what, backward in (("float32", AS_IT_IS), ("exact", staticmethod(exact))):
        AnnealedGates.backward = backward  # type: ignore[method-assign, assignment]
        for name, values in zip(("accuracy", "units open"), zip(*map(run, range(5)), strict=True), strict=True):
            mean, std = 100 * statistics.mean(values), 100 * statistics.stdev(values)
            print(f"{what}, {name}: {mean:.1f} ± {std:.1f} %")
