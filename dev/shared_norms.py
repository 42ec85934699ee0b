"""How large losses become if HAT's tasks share their batch norms (000), by the masks and by how statistics are made.

python -m dev.shared_norms    # a ResNet-18 of width 8, four tasks of digits-and-clothes, four epochs each: minutes
"""

import warnings
from unittest.mock import patch

import hatrack as hr
from hatrack import BENCHMARKS, HAT, Network, Regime, Trainer
from hatrack.methods.parts.task_norms import TaskNorms
from hatrack.networks.resnet import resnet18
from hatrack.seeds import seeded

TASKS, EPOCHS, CLIP = 4, 4, 10000.0


def largest_loss(masks: str, *, gathered: bool) -> float:
    """Learn the tasks; return the largest test loss that a finished task had after any later one.

    Args:
        masks: HAT's option.
        gathered: whether running statistics are gathered anew when a task is finished; otherwise torch's are left.
    """
    tasks = BENCHMARKS["digits-and-clothes"](0, data="sample")
    with seeded(0, "weights"):
        trunk = resnet18(tasks[0].shape, width=8)
    method, found = HAT(Network(trunk, tasks=tasks), norms="shared", masks=masks), []
    with patch.object(TaskNorms, "recompute", TaskNorms.recompute if gathered else lambda *_: None):
        for task in tasks[:TASKS]:
            method.learn(task, Trainer(Regime(epochs=EPOCHS, clip=CLIP), progress=False, engine="eager"))
            found += [hr.evaluate(method, old.test).loss for old in tasks[: task.index]]
    return max(found)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of layers in which little is free
    for masks in ("binary", "soft"):
        for gathered in (True, False):
            how = "gathered anew" if gathered else "as torch leaves them"
            print(f"{masks} masks, statistics {how}: {largest_loss(masks, gathered=gathered):.1f}", flush=True)
