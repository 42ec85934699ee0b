"""Stable SGD by the published script on split CIFAR-100 (004): what dropout of 0.5 does to the statistics of batch norms.

hatrack data get cifar100
python -m dev.dropout_and_norms    # accuracy on each of three tasks right after it was learned, seed 0

In evaluation the norms use statistics that were gathered with dropout. They are gathered anew without, and compared.
"""

from dataclasses import replace

import torch
from torch.nn import BatchNorm2d

from hatrack import Trainer, evaluate
from hatrack.experiments.build import build_method, build_tasks, build_trunk
from hatrack.methods.method import Method
from hatrack.recipes import RECIPES
from hatrack.tasks.split import Split

ROWS = ("stable SGD", "stable SGD, published script")
TASKS, PART = 3, 100  # tasks that are learned; images at a time


@torch.no_grad()
def gather_anew(method: Method, split: Split) -> None:
    """Replace the statistics of all batch norms by their means over a data set, without dropout."""
    method.eval()
    norms = [module for module in method.net.trunk.modules() if isinstance(module, BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all parts
        norm.train()
    for part in torch.arange(len(split)).split(PART):
        method.net.trunk(split.inputs(part))
    method.eval()


def accuracies(label: str) -> list[tuple[float, float]]:
    """Return the accuracy on each task right after it was learned, with the statistics as they are and gathered anew."""
    (part,) = RECIPES["regimes"].only(("cifar100",))
    (row,) = (row for row in part.rows if row.label == label)
    run = replace(row.at(0), first_tasks=TASKS)
    tasks, found = build_tasks(run, "cpu"), []
    method = build_method(run, tasks, build_trunk(run, tasks), "cpu")
    for k, task in enumerate(tasks):
        method.learn(task, Trainer(run.regime, seed=0, progress=False, engine="eager"))
        kept = {name: value.clone() for name, value in method.state_dict().items()}
        momenta = {m: m.momentum for m in method.net.trunk.modules() if isinstance(m, BatchNorm2d)}
        plain = evaluate(method, task.test).accuracy
        gather_anew(method, task.train)
        found.append((plain, evaluate(method, task.test).accuracy))
        method.load_state_dict(kept)
        for norm, momentum in momenta.items():
            norm.momentum = momentum
        assert evaluate(method, task.test).accuracy == found[k][0], "the next task begins where this one ended"
    return found


if __name__ == "__main__":
    for label in ROWS:
        for k, (plain, anew) in enumerate(accuracies(label), 1):
            print(f"{label}, task {k}: {100 * plain:.1f} %, with statistics gathered without dropout {100 * anew:.1f} %")
