"""What is compared with what: the same network, data, batch and method, within one run on one device."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hatrack import METHODS, NETWORKS, Method, Network, Regime, Split, Task, Trainer
from hatrack.engine.choice import PAYS, Precision, choose_engine
from hatrack.engine.interleaving import run_interleaved
from hatrack.engine.precision import precision_scope
from hatrack.engine.recorded import own_stream
from hatrack.seeds import seeded
from hatrack.tasks.batches import count_batches
from hatrack.tasks.device import all_to_device
from hatrack.training.fit_loop import FitLoop
from speed.authors import Authors, GatedAlexNet
from speed.clock import WARM, Contest, Row, Turn, in_turns, timed
from speed.loops import BATCH, CLASSES, LOOPS, HATByHand, Plain, noise, perceptron
from speed.peers import Missing, Peer

PLAIN, AUTHORS, AVALANCHE, BY_HAND = "plain loop", "the authors' loop", "Avalanche", "HAT by hand, eager"
CPU = torch.device("cpu")
EARLIER = 2  # batches of a task that was learned before the one that is measured
FLEET = 50_000  # images of a task that a fleet learns: an epoch is then as long as those of real data sets


@dataclass(frozen=True)
class Pair:
    """A network and a method, and the number of the task (from 1) that is learned while the clock runs."""

    network: str
    method: str
    task: int
    shape: tuple[int, ...]
    network_options: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    heads: str = "multi"
    clip: float = 1e4

    def tasks(self, count: int, valid: float, device: torch.device, *, raw: bool) -> list[Task]:
        """The last one has `count` images, of which a share is held out; as bytes, or as the floats that others get."""
        found = []
        for number in range(self.task):
            x, y = noise(number, count if number == self.task - 1 else BATCH * EARLIER, self.shape)
            x = x if raw else x.float() / 255
            share = valid if number == self.task - 1 else 0.0
            found.append(Task.from_arrays(number, f"noise {number}", x, y, x[:BATCH], y[:BATCH], valid=share))
        return all_to_device(found, device)

    def prepare(self, tasks: list[Task], seed: int = 0) -> Method:
        """The method after all tasks but the last."""
        with seeded(seed, "weights"):
            trunk = NETWORKS[self.network](self.shape, **self.network_options)
        device = tasks[0].train.y.device
        example = tasks[0].train.inputs(torch.arange(2, device=device))
        net = Network(trunk.to(device), [CLASSES] * self.task, example, heads=self.heads, seed=seed)
        method = METHODS[self.method](net, **self.options).to(device)
        for task in tasks[:-1]:
            method.learn(task, Trainer(Regime(epochs=1), engine="eager"))
        return method


PERCEPTRON = {"network": "mlp", "shape": (1, 28, 28), "heads": "shared", "clip": 0.0}  # the others don't clip either
WIDTHS = {"widths": (100, 100), "dropout": 0.0, "input_dropout": 0.0}
SMALL = [
    Pair(method="sgd", task=1, network_options=WIDTHS, **PERCEPTRON),
    Pair(method="ewc", task=5, network_options=WIDTHS, options={"samples": BATCH}, **PERCEPTRON),
    Pair(method="si", task=2, network_options=WIDTHS, **PERCEPTRON),
]
GATED = Pair(method="hat", task=2, network_options=WIDTHS, **PERCEPTRON | {"heads": "multi"})  # against plain SGD
HAT = Pair(network="alexnet", method="hat", task=2, shape=(3, 32, 32))


# This library


def ours(engines: list[str], device: torch.device) -> tuple[list[str], list[Row]]:
    """The engines that work on the device, and a row for each that does not."""
    able, rows = [], []
    for engine in engines:
        try:
            choose_engine(engine, device.type, 1)
            able.append(engine)
        except ValueError as error:
            rows.append(Row(named(engine), skipped=str(error).split(";")[0]))
    return able, rows


def named(engine: str) -> str:
    return f"hatrack, {engine}"


def usual(device: torch.device) -> tuple[str, ...]:
    """The rows of the engines that short and long runs have."""
    found = [choose_engine("auto", device.type, steps) for steps in (1, PAYS[device.type])]
    return tuple(dict.fromkeys(named("compiled" if c else "recorded" if r else "eager") for c, r in found))


def within_learn(
    fits: list[tuple[Method, Task, Trainer]], then: Callable[[list[FitLoop]], None], begun: tuple[FitLoop, ...] = ()
) -> None:
    """Call `then` with a loop for each fit, all begun and none ended, while every method is within its `learn`."""
    if not fits:
        then(list(begun))
        return
    method, task, trainer = fits[0]

    def fit(method: Method, task: Task, **how: Any) -> None:
        loop = trainer.start(method, task, **how)
        within_learn(fits[1:], then, (*begun, loop))
        loop.close()

    method.learn(task, fit)


def tensors(split: Split) -> tuple[Tensor, Tensor]:
    """A split's images as a network sees them, and its labels: what plain loops work on."""
    return split.inputs(torch.arange(len(split), device=split.y.device)), split.y


# The contests


def small(pair: Pair, engines: list[str], steps: int, rounds: int) -> tuple[Contest, dict[str, str]]:
    """A perceptron on the CPU, on one thread: whole epochs, per step. All train on the same floats."""
    tasks = pair.tasks(steps * BATCH, 0.0, CPU, raw=False)
    able, rows = ours(engines, CPU)
    regime = Regime(clip=pair.clip, schedule="constant")
    entries = [(named(engine), pair, engine) for engine in able]
    turns: dict[str, Turn] = {PLAIN: _plain(LOOPS[pair.method](perceptron()), tasks)}
    if pair is GATED:
        turns[BY_HAND] = _plain(HATByHand(perceptron()), tasks)
        entries += [(f"{named(engine)}, sgd", replace(pair, method="sgd"), engine) for engine in able]
    fits = [(one.prepare(tasks), tasks[-1], Trainer(regime, engine=engine)) for _, one, engine in entries]
    versions: dict[str, str] = {}

    def measure(loops: list[FitLoop]) -> None:
        mine = {name: timed(loop.epoch, CPU) for (name, _, _), loop in zip(entries, loops, strict=True)}
        rows[:0] = in_turns(mine | turns, rounds, steps)

    with ExitStack() as running:
        try:
            peer = running.enter_context(Peer(pair.method, task=pair.task, steps=steps))
            turns[AVALANCHE], versions = peer.epoch, peer.versions
        except Missing as reason:
            rows.append(Row(AVALANCHE, skipped=str(reason)))
        within_learn(fits, measure)
    title = f"784-100-100-10, {pair.method}, task {pair.task}, batch {BATCH}, one thread of the CPU"
    return Contest(title, "step", rows, usual(CPU)), versions


def _plain(loop: Plain, tasks: list[Task]) -> Turn:
    for task in tasks[:-1]:
        loop.epoch(*tensors(task.train))
        loop.finish(*tensors(task.train))
    data = tensors(tasks[-1].train)
    return timed(lambda: loop.epoch(*data), CPU)


def large(engines: list[str], device: torch.device, count: int, rounds: int, done: Callable[[Contest], None]) -> None:
    """AlexNet and HAT: the training steps alone, and whole epochs with the validation that belongs to them; `done` is told
    of each."""
    tasks = HAT.tasks(count, 0.15, device, raw=True)
    task, (able, without) = tasks[-1], ours(engines, device)
    fits = [(HAT.prepare(tasks), task, Trainer(Regime(clip=HAT.clip), engine=engine)) for engine in able]
    authors, train, valid = _authors(tasks, device), tensors(task.train), tensors(task.valid)
    steps = count_batches(len(task.train), BATCH)
    sizes = f"a whole epoch: {len(task.train)} images to train on, {len(task.valid)} to validate"

    def measure(loops: list[FitLoop]) -> None:
        for what, theirs, part, unit, per in (
            ("training", lambda: authors.train(1, *train), lambda c: c.train_epoch(len(c.result.epochs)), "step", steps),
            (sizes, lambda: authors.epoch(1, train, valid), lambda c: c.epoch(), "epoch", 1),
        ):
            mine = {named(e): timed(lambda c=c, part=part: part(c), device) for e, c in zip(able, loops, strict=True)}
            rows = in_turns(mine | {AUTHORS: timed(theirs, device)}, rounds, per) + without
            done(Contest(f"{alexnet(device)}: {what}", unit, rows, usual(device)))

    with precision_scope("tf32", device), own_stream(device):
        within_learn(fits, measure)


def alexnet(device: torch.device) -> str:
    where = "one thread of the CPU" if device.type == "cpu" else "GPU"
    return f"AlexNet, HAT, task 2, batch {BATCH}, float32, {where}"


def fleets(engines: list[str], device: torch.device, seeds: int, done: Callable[[Contest], None]) -> None:
    """Several seeds side by side on one GPU, by each of these engines; `done` is told after each."""
    rows: list[Row] = []
    for engine in engines:
        ways = [(seeds, "tf32"), *([(1, "bfloat16"), (seeds, "bfloat16")] if engine == "compiled" else [])]
        for number, precision in ways if device.type == "cuda" else []:
            rows.append(fleet(engine, number, device, precision))
            done(Contest(f"{alexnet(device)}: seeds side by side", "step", list(rows), usual(device)))


def _authors(tasks: list[Task], device: torch.device) -> Authors:
    loop = Authors(GatedAlexNet([CLASSES] * 2).to(device))
    loop.train(0, *tensors(tasks[0].train))
    loop.finish(0)
    return loop


def fleet(engine: str, seeds: int, device: torch.device, precision: Precision, epochs: int = 4) -> Row:
    """Several seeds side by side on one GPU, after the first epochs of each, in which steps are recorded."""
    tasks = HAT.tasks(FLEET, 0.15, device, raw=True)
    stamps: list[list[float]] = [[] for _ in range(seeds)]

    def work(seed: int) -> None:
        def fit(method: Method, task: Task, **how: Any) -> None:
            loop = Trainer(Regime(clip=HAT.clip), seed=seed, engine=engine).start(method, task, **how)
            for number in range(WARM + epochs):
                loop.train_epoch(number)  # it ends with a wait for its own work on the GPU
                stamps[seed].append(time.perf_counter())
            loop.close()

        with precision_scope(precision, device):
            methods[seed].learn(tasks[-1], fit)

    methods = [HAT.prepare(tasks, seed) for seed in range(seeds)]
    with precision_scope(precision, device):
        run_interleaved([lambda seed=seed: work(seed) for seed in range(seeds)], device, seeds)
    steps = count_batches(len(tasks[-1].train), BATCH)
    return Row(in_fleet(engine, seeds, precision), [1 / (steps * together(stamps, WARM))])


def in_fleet(engine: str, seeds: int, precision: Precision) -> str:
    """The name of its row."""
    number = f", {seeds} seeds side by side" if seeds > 1 else ""
    return f"{named(engine)}{', bfloat16' if precision == 'bfloat16' else ''}{number}"


def together(stamps: list[list[float]], warm: int) -> float:
    """Epochs per second of all, given when each ended each epoch, in the time when all had `warm` behind them and none was
    done: outside of it some would have the GPU for themselves."""
    start, end = max(row[warm - 1] for row in stamps), min(row[-1] for row in stamps)
    if end <= start:
        raise ValueError("the seeds of the fleet did not run at the same time: more epochs are needed")
    done = [np.interp([start, end], row, np.arange(len(row))) for row in stamps]
    return float(sum(late - early for early, late in done)) / (end - start)
