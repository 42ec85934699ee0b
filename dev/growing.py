"""What growing did in a run: the logits of every task when it was learned and at the end, bit for bit, and sizes.

The run must have kept its model after every task:

    hatrack run pmnist hat --data sample --tasks 30 --grow auto --keep-model --keep-each --out runs
    python dev/growing.py runs/NAME.json [cuda]

The exit code is 1 if a task has changed in any bit of any logit.
"""

import sys
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from hatrack import Record, Run, Task, load
from hatrack.experiments.build import build_tasks, build_trunk
from hatrack.methods.guarantees import logits
from hatrack.methods.method import Method

BATCH = 256  # images per forward pass


def answers(method: Method, task: Task) -> Tensor:
    """The logits of a task on all its test images."""
    parts = torch.arange(len(task.test), device=task.test.y.device).split(BATCH)
    return torch.cat([logits(method, task.index, task.test.inputs(part)) for part in parts])


def widths(method: Method) -> str:
    """The present width of every layer, each once for layers in a row that have the same."""
    sizes = [p.shape[0] for p in method.net.trunk.parameters() if p.dim() > 1]
    return ", ".join(str(size) for size, _ in groupby(sizes))


def independent(spec: Run, tasks: list[Task], device: str) -> int:
    """How many weights a network of the first width for every task has, each with its head."""
    trunk = build_trunk(spec, tasks).to(device)
    with torch.no_grad():
        features = trunk.eval()(tasks[0].train.inputs(torch.arange(1, device=device))).shape[1]
    own = sum(p.numel() for p in trunk.parameters())
    return sum(own + (features + 1) * task.classes for task in tasks)


def main(record: Path, device: str = "cpu") -> int:
    found = Record.load(record)
    spec = Run.from_spec(found.spec.written)
    tasks = build_tasks(spec, device)
    last = load(record.with_suffix(".safetensors")).to(device)
    changed = 0
    for task in tasks:
        then = load(record.with_suffix(f".task-{task.index + 1}.safetensors")).to(device)
        before, now = answers(then, task), answers(last, task)
        same = torch.equal(before, now)
        changed += not same
        right = (now.argmax(1) == task.test.y.cpu()).float().mean()
        bits = "the same bits" if same else "CHANGED"
        print(f"{task.name}: {right:.2%}, {bits} in {before.numel():,} logits; {widths(then)}")
    at = [row[k] for k, row in enumerate(found.accuracy)]
    ends = [sum(part) / len(part) for part in (at[: len(at) // 3], at[-(len(at) // 3) :])]
    print(f"the first third of the tasks {ends[0]:.2%}, the last {ends[1]:.2%}; {found.seconds.total:.0f} s")
    steps = len(last.growth.steps) if last.growth else 0
    weights, alone = last.num_parameters(), independent(spec, tasks, device)
    print(f"grown {steps} times to {weights:,} weights; independent networks have {alone:,}, {alone / weights:.1f} times")
    return int(changed > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:3]))
