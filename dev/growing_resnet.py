"""Growing ResNet-18: ten tasks of CIFAR with HAT, and whether all old answers are the same bits at the end.

    python dev/growing_resnet.py --device cuda

A line is printed when a task has been learned, with what was learned and what the task cost; the answers of every finished
task on its test images are kept, and compared bit for bit with those at the end. The exit code is 1 if a bit has changed, or
if the network grew less than twice. On a GPU this takes a few minutes; `--examples 200 --width 8` try it on a CPU.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from hatrack import Network, Regime, Task, Trainer
from hatrack.benchmarks.cifar import cifar
from hatrack.engine.precision import precision_scope
from hatrack.methods.guarantees import logits
from hatrack.methods.hat import HAT
from hatrack.networks.resnet import resnet18
from hatrack.seeds import seeded
from hatrack.tasks.device import all_to_device
from hatrack.tasks.split import Split

BATCH = 500  # images per forward pass: every pass of a task has the same size, before and after
LEAST = 2  # how often the network must grow


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--width", type=int, default=64, help="channels of the first stage")
    parser.add_argument("--grow-below", type=float, default=0.25)
    parser.add_argument("--grow-by", type=float, default=0.5)
    parser.add_argument("--examples", type=int, default=0, help="of every split; 0: all")
    parser.add_argument("--engine", default="eager", choices=("eager", "recorded", "compiled", "auto"))
    parser.add_argument("--precision", default="float32", choices=("float32", "tf32", "bfloat16"))
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(words)


def shortened(tasks: list[Task], examples: int) -> list[Task]:
    """The tasks with so many examples per split, at most; 0: with all."""

    def short(split: Split) -> Split:
        return replace(split, y=split.y[:examples], rows=split.rows[:examples])

    return [replace(t, train=short(t.train), valid=short(t.valid), test=short(t.test)) for t in tasks] if examples else tasks


def answers(method: HAT, task: Task) -> Tensor:
    """The logits of a task on all its test images."""
    parts = torch.arange(len(task.test), device=task.test.y.device).split(BATCH)
    return torch.cat([logits(method, task.index, task.test.inputs(part)) for part in parts])


def widths(method: HAT) -> str:
    """The present width of every layer, each once for layers in a row that have the same."""
    return ", ".join(str(size) for size, _ in groupby(p.shape[0] for p in method.net.trunk.parameters() if p.dim() > 1))


def main(words: Sequence[str] | None = None) -> int:
    given = arguments(words)
    warnings.simplefilter("ignore")  # each growth warns; the lines below tell of it
    began = time.perf_counter()
    tasks = all_to_device(shortened(cifar(given.seed, tasks=given.tasks), given.examples), given.device)
    with seeded(given.seed, "weights"):
        trunk = resnet18(tasks[0].shape, width=given.width).to(given.device)
    net = Network(trunk, tasks=tasks, seed=given.seed).to(given.device)
    method = HAT(net, grow="auto", grow_below=given.grow_below, grow_by=given.grow_by)
    regime = Regime(epochs=given.epochs, batch=given.batch, optimizer="momentum", lr=given.lr)
    trainer = Trainer(regime, seed=given.seed, progress=False, engine=given.engine)
    print(f"made in {time.perf_counter() - began:.0f} s: {method.num_parameters():,} weights, {widths(method)}", flush=True)
    kept, changed = list[Tensor](), 0
    assert method.growth is not None
    with precision_scope(given.precision, torch.device(given.device)):
        for task in tasks:
            changed += learn_and_compare(method, task, tasks, trainer, kept)
    grown = len(method.growth.steps)
    count = sum(logit.numel() for logit in kept)
    print(
        f"{len(tasks)} tasks, grown {grown} times to {method.num_parameters():,} weights; {count:,} logits of all tasks "
        f"{'CHANGED' if changed else 'have the bits that they had when their task was learned'}; "
        f"{time.perf_counter() - began:.0f} s in all"
    )
    return int(changed > 0 or grown < LEAST)


def learn_and_compare(method: HAT, task: Task, tasks: Sequence[Task], trainer: Trainer, kept: list[Tensor]) -> int:
    """Learn a task, print a line, and return how many of the tasks so far, this one included, answer in other bits."""
    began = time.perf_counter()
    method.learn(task, trainer)
    seconds = time.perf_counter() - began
    kept.append(answers(method, task).cpu())
    now = [answers(method, old).cpu() for old in tasks[: len(kept)]]
    changed = [old.name for old, a, b in zip(tasks, now, kept, strict=False) if not torch.equal(a, b)]
    right = (kept[-1].argmax(1) == task.test.y.cpu()).float().mean().item()
    assert method.growth is not None
    bits = f"CHANGED: {', '.join(changed)}" if changed else f"{len(now)} of {len(now)} tasks have the same bits"
    print(
        f"{task.index + 1:2d} {task.name:16s} accuracy {right:7.2%}  grown {len(method.growth.steps)} times  "
        f"{method.num_parameters():11,} weights ({widths(method)})  {bits}  {seconds:.0f} s, "
        f"comparing {time.perf_counter() - began - seconds:.0f} s",
        flush=True,
    )
    return len(changed)


if __name__ == "__main__":
    sys.exit(main())
