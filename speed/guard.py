"""What `hr.protect` costs: a step of a plain loop on ResNet-18, bare and guarded: python -m speed.guard [--device cuda].

Bare, HAT and PMASK take turns, each in a block in which its second task is learned, so that the first one holds weights.
Random images 3x32x32, float32, SGD with momentum and decay. On the CPU one thread is used, and processor time is counted.
"""

import argparse
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hatrack as hr
from hatrack import NETWORKS, Guard
from hatrack.seeds import seeded
from speed.clock import Turn, timed

ASKED = 1.2  # times the bare step, at most: HAT on the CPU, and on a GPU at batch 512
SHAPE, CLASSES = (3, 32, 32), 10


@dataclass(frozen=True)
class Cost:
    """Seconds of a step, and how many times as long as the bare one it took: the median over the turns."""

    name: str
    batch: int
    step: float
    ratio: float


class Loop:
    """A backbone, a head per task and an optimizer, as users have them; a guard or none.

    Args:
        network: the name of the backbone.
        method: "hat" or "pmask"; "bare" has no guard.
        x: a batch of images.
    """

    def __init__(self, network: str, method: str, x: Tensor) -> None:
        with seeded(0, "weights"):
            self.backbone = NETWORKS[network](tuple(x.shape[1:])).to(x.device)
        with torch.no_grad():
            width = self.backbone.eval()(x[:2]).shape[1]
        self.heads = [nn.Linear(width, CLASSES).to(x.device) for _ in range(2)]
        held = [*self.backbone.parameters(), *(p for head in self.heads for p in head.parameters())]
        self.optimizer = torch.optim.SGD(held, lr=0.01, momentum=0.9, weight_decay=5e-4)
        self.x, self.y = x, torch.arange(len(x), device=x.device) % CLASSES
        self.guard: Guard | None = None
        if method != "bare":
            self.guard = hr.protect(self.backbone, self.optimizer, example=x[:2], method=method)
            with self.guard.learn("first", steps=2, own=self.heads[:1], settle=[x[:8]]):
                self.step(0, 8)
                self.step(0, 8)

    def step(self, task: int, count: int | None = None) -> None:
        """One step on the batch, or on its first images."""
        self.backbone.train()
        self.optimizer.zero_grad()
        F.cross_entropy(self.heads[task](self.backbone(self.x[:count])), self.y[:count]).backward()
        self.optimizer.step()


def costs(network: str, methods: Sequence[str], batch: int, rounds: int, device: torch.device, steps: int = 1) -> list[Cost]:
    """Measure steps of the second task under guards; the bare loop is the first of the results."""
    x = torch.randn(batch, *SHAPE, generator=torch.Generator().manual_seed(0)).to(device)
    names = ["bare", *methods]
    loops, seconds = [Loop(network, name, x) for name in names], [list[float]() for _ in names]
    with ExitStack() as blocks:
        for loop in loops:
            if loop.guard is not None:
                total = (rounds + 1) * steps
                blocks.enter_context(loop.guard.learn("second", steps=total, own=loop.heads[1:], settle=[x[:8]]))
        turns = [_turn(loop, steps, device) for loop in loops]
        for number in range(-1, rounds):  # the first round warms up
            for turn, times in zip(turns, seconds, strict=True):
                taken = turn() / steps
                if number >= 0:
                    times.append(taken)
    ratios = [statistics.median(a / b for a, b in zip(times, seconds[0], strict=True)) for times in seconds]
    return [
        Cost(name, batch, statistics.median(times), ratio) for name, times, ratio in zip(names, seconds, ratios, strict=True)
    ]


def _turn(loop: Loop, steps: int, device: torch.device) -> Turn:
    def work() -> None:
        for _ in range(steps):
            loop.step(1)

    return timed(work, device)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="resnet18", choices=sorted(NETWORKS))
    parser.add_argument("--methods", default="hat,pmask", help="by commas")
    parser.add_argument("--batches", default="64,512", help="by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=None, help="of one turn: 1 on the CPU, 20 on a GPU")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args(words)
    device = torch.device(given.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    steps = given.steps or (1 if device.type == "cpu" else 20)
    print(f"{given.network}, {device}, float32, medians of {given.rounds} turns of {steps} steps; asked of hat: {ASKED}")
    for batch in map(int, given.batches.split(",")):
        for cost in costs(given.network, given.methods.split(","), batch, given.rounds, device, steps):
            print(f"batch {batch:4d} {cost.name:6s} {1e3 * cost.step:9.1f} ms   {cost.ratio:5.2f} times bare", flush=True)


if __name__ == "__main__":
    main()
