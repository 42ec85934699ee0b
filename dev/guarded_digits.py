"""Compares HAT in a loop of one's own, under a guard, with the Trainer: the same weights, gates, batches and steps.

python -m dev.guarded_digits    # the first task of the sample of split MNIST, at sixteen seeds; minutes
"""

import copy
import math
import statistics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hatrack as hr
from hatrack import BENCHMARKS, HAT, Network, Regime, Task, Trainer
from hatrack.networks.mlp import mlp
from hatrack.seeds import derive, generator, seeded
from hatrack.tasks.batches import split_batches
from hatrack.tasks.split import Split

EPOCHS, BATCH, LR, SEEDS = 8, 32, 0.1, 16


def network(task: Task, seed: int) -> Network:
    """Return the network of a seed, always with the same weights."""
    with seeded(seed, "weights"):
        trunk = mlp(task.shape, widths=(100, 100), dropout=0.0, input_dropout=0.0)
    return Network(trunk, tasks=[task], seed=seed)


def whole(split: Split) -> tuple[Tensor, Tensor]:
    """Return all images of a data set as the network sees them, and their labels."""
    return split.inputs(torch.arange(len(split))), split.y


def trained(task: Task, seed: int, *, best: bool) -> float:
    """Return the accuracy that a Trainer reaches, with the best epoch on validation data or the last one."""
    method = HAT(network(task, seed))
    regime = Regime(epochs=EPOCHS, batch=BATCH, lr=LR, schedule="constant", restore=best)
    method.learn(task, Trainer(regime, seed=seed, progress=False, engine="eager"))
    return hr.evaluate(method, task.test).accuracy


def guarded(task: Task, seed: int, *, best: bool) -> float:
    """Return the accuracy that a plain loop reaches under a guard, with its best epoch or its last one."""
    net = network(task, seed)
    backbone, head, gates = net.trunk, net.heads[0], HAT(network(task, seed)).embeddings[0]
    optimizer = torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=LR)
    model, (x, y), held_out = nn.ModuleList([backbone, head]), whole(task.train), whole(task.valid)
    guard = hr.protect(backbone, optimizer, example=x[:2])
    fit, lowest, state = derive(seed, "task", 0, "fit", 0), math.inf, model.state_dict()
    with guard.learn("digits", steps=len(split_batches(y, BATCH)), own=[head]):
        guard.module.embedding.data.copy_(gates)
        for epoch in range(EPOCHS):
            for rows in split_batches(torch.randperm(len(x), generator=generator(fit, "batches", epoch)), BATCH):
                optimizer.zero_grad()
                F.cross_entropy(head(backbone.train()(x[rows])), y[rows]).backward()
                optimizer.step()
            with torch.no_grad():
                loss = F.cross_entropy(head(backbone.eval()(held_out[0])), held_out[1]).item()
            if loss < lowest:
                lowest, state = loss, copy.deepcopy(model.state_dict())
        if best:
            model.load_state_dict(state)
    with guard.use("digits"), torch.no_grad():
        images, labels = whole(task.test)
        return (head(backbone(images)).argmax(1) == labels).float().mean().item()


if __name__ == "__main__":
    digits = BENCHMARKS["smnist"](0, data="sample")[0]
    for what, values in {
        "Trainer, best epoch": [trained(digits, seed, best=True) for seed in range(SEEDS)],
        "Trainer, last epoch": [trained(digits, seed, best=False) for seed in range(SEEDS)],
        "guard, best epoch": [guarded(digits, seed, best=True) for seed in range(SEEDS)],
        "guard, last epoch": [guarded(digits, seed, best=False) for seed in range(SEEDS)],
    }.items():
        found = [100 * value for value in values]
        print(f"{what}: {statistics.mean(found):.1f} ± {statistics.stdev(found):.1f} %, lowest {min(found):.1f} %")
