"""EWC's step with one summed spring per weight or one per task, and the Fisher against an epoch: python -m speed.penalty

Springs to K tasks are measured for K = 1, 2, 5, 10, 20, as 002 asks: the sum over the tasks written out (naive), and the one
spring that it equals (summed, what this library does). All take turns in one run, beside a step without a penalty and one
with L2 regularization of the same weights, the most common one. The naive sum keeps two vectors per task: 2.2 GB with 20
tasks on 002's network. `--out docs/results/timings/NAME.json` writes the numbers for the page of ewc-cnn (`make results`).
"""

import argparse
import json
import platform
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hatrack import EWC, NETWORKS, Method, Network, Regime, Task, Trainer
from hatrack.engine.recorded import own_stream
from hatrack.methods.parts.fisher import fisher_diagonal
from hatrack.methods.parts.vectors import values
from hatrack.seeds import seeded
from hatrack.tasks.split import Batch
from speed.clock import Row, Turn, in_turns, timed

ANCHORS = (1, 2, 5, 10, 20)
SHAPE, CLASSES, BATCH = (1, 28, 28), 10, 64
Build = Callable[[tuple[int, ...]], nn.Module]  # makes the trunk for images of a shape
REGIME = Regime(batch=BATCH, optimizer="adam", lr=0.0001)  # 002's


class NaiveEWC(EWC):
    """EWC that keeps the Fisher and the weights of every task, and adds up their penalties in every step."""

    def __init__(self, net: Network, **options: Any) -> None:
        super().__init__(net, **options)
        self.springs: list[tuple[Tensor, Tensor]] = []  # the Fisher and the weights after each task

    def consolidate(self, new: Tensor) -> None:
        self.springs.append((new.clone(), values(self.net.shared_parameters()).detach()))

    def penalty(self) -> Tensor:
        """Return (lambda / 2) sum_k sum_i F_ki (theta_i - theta_ki)^2."""
        now = values(self.net.shared_parameters())
        each = [fisher @ (now - anchor).square() for fisher, anchor in self.springs]
        return self.strength / 2 * torch.stack(each).sum()


class L2(Method):
    """A penalty on the squares of all weights, in the loss as Keras has it."""

    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) + 0.0001 * values(self.net.shared_parameters()).square().sum()


def noise(images: int, device: torch.device) -> Task:
    """A task of random images."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (images, *SHAPE), dtype=torch.uint8, generator=draw).to(device)
    y = (torch.arange(images) % CLASSES).to(device)
    return Task.from_arrays(0, "noise", x, y, x[:10], y[:10], valid=0.0)


def prepare(kind: type[Method], network: Build, task: Task, springs: Sequence[Tensor] = (), **options: Any) -> Method:
    """A method with springs of these Fisher diagonals, each to weights that have moved a little since."""
    with seeded(0, "weights"):
        trunk = network(SHAPE).to(task.train.y.device)
    example = task.train.inputs(torch.arange(2, device=task.train.y.device))
    method = kind(Network(trunk, [CLASSES], example, heads="shared"), **options)
    draw = torch.Generator().manual_seed(1)
    for fisher in springs:
        assert isinstance(method, EWC)
        method.consolidate(fisher)
        with torch.no_grad():
            for parameter in method.net.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=draw).to(parameter), alpha=0.001)
    return method


def steps(method: Method, task: Task, count: int) -> Turn:
    """So many training steps, as the engine runs short fits: recorded on a GPU, eagerly on a CPU."""
    device = task.train.y.device
    loop = Trainer(REGIME).start(method, task)
    index = torch.arange(BATCH, device=device)
    number = torch.zeros((), dtype=torch.int64, device=device)
    method.train()

    def work() -> None:
        for _ in range(count):
            loop.step(index, number)

    return timed(work, device)


def penalties(network: Build, anchors: Sequence[int], task: Task, rounds: int, count: int) -> list[dict[str, Any]]:
    """Seconds per step, for every number of tasks."""
    found = []
    for many in anchors:
        size = sum(p.numel() for p in prepare(Method, network, task).parameters())
        draw = torch.Generator().manual_seed(many)
        springs = [torch.rand(size, generator=draw).to(task.train.y.device) for _ in range(many)]
        turns = {
            "sgd": steps(prepare(Method, network, task), task, count),
            "l2": steps(prepare(L2, network, task), task, count),
            "summed": steps(prepare(EWC, network, task, springs, limit=0.0), task, count),
            "naive": steps(prepare(NaiveEWC, network, task, springs, limit=0.0), task, count),
        }
        del springs
        rows = {row.name: row for row in in_turns(turns, rounds, per=count)}
        found.append({"tasks": many, **seconds(rows), "naive / summed": rows["naive"].times(rows["summed"])})
        print(f"{many:6d} " + " ".join(f"{1e3 * row.median:10.2f}" for row in rows.values()) + ratio(found[-1]), flush=True)
    return found


def fisher_and_epoch(network: Build, task: Task, rounds: int) -> dict[str, Any]:
    """Seconds of the Fisher of all images, and of one epoch of training on them."""
    method, device = prepare(Method, network, task), task.train.y.device
    weights = method.net.shared_parameters()
    trained = prepare(Method, network, task)
    loop = Trainer(REGIME).start(trained, task)
    turns = {
        "fisher": timed(lambda: fisher_diagonal(method, task.train, 0, weights), device),
        "epoch": timed(lambda: loop.train_epoch(0), device),
    }
    rows = {row.name: row for row in in_turns(turns, rounds, per=1)}
    return {"images": len(task.train), **seconds(rows), "fisher / epoch": rows["fisher"].times(rows["epoch"])}


def seconds(rows: dict[str, Row]) -> dict[str, float]:
    if skipped := [f"{row.name}: {row.skipped}" for row in rows.values() if row.skipped]:
        raise RuntimeError("; ".join(skipped))
    return {name: row.median for name, row in rows.items()}


def ratio(row: dict[str, Any]) -> str:
    return f"   {row['naive / summed'][0]:8.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="cnn", choices=["cnn", "mlp"], help="002's network, or the perceptron")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--quick", action="store_true", help="seconds, to try it out: a small perceptron, few tasks and images"
    )
    parser.add_argument("--out", type=Path, help="write the numbers to this file, as JSON")
    words = parser.parse_args(arguments)
    name, anchors, rounds = ("mlp", (1, 2), 2) if words.quick else (words.network, ANCHORS, words.rounds)
    network = partial(NETWORKS[name], widths=(64, 64)) if words.quick else NETWORKS[name]
    device = torch.device(words.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, one thread ({platform.machine()})"
    few, many = (noise(images, device) for images in (2 * BATCH, 4 * BATCH if words.quick else 2048))
    print(f"{name}, batch {BATCH}, {where}, torch {torch.__version__}: medians of {rounds} turns")
    print("milliseconds per step\n tasks        sgd         l2     summed      naive   naive / summed")
    found: dict[str, Any] = {
        "network": name,
        "batch": BATCH,
        "device": where,
        "torch": torch.__version__,
        "rounds": rounds,
    }
    with own_stream(device):
        found["steps"] = penalties(network, anchors, few, rounds, count=20 if device.type == "cuda" else 1)
        found["fisher"] = fisher_and_epoch(network, many, max(2, rounds // 2))
    measured = found["fisher"]
    print(
        f"{measured['images']} images: the Fisher {measured['fisher']:.2f} s, an epoch {measured['epoch']:.2f} s: "
        f"{measured['fisher / epoch'][0]:.2f} times as long"
    )
    if words.out:
        words.out.parent.mkdir(parents=True, exist_ok=True)
        words.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
