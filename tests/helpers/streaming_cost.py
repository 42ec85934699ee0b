"""What it costs to train on a folder of images that is streamed: time beside a plain DataLoader loop, memory, accuracy.

`python -m tests.helpers.streaming_cost --images 200000` prints the figures; test_streaming_cost.py checks them loosely.
"""

import argparse
import gc
import json
import math
import os
import resource
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from hatrack import Method, Network, Regime, Task, Trainer, evaluate

CLASSES, SIDE, BATCH, LR = 10, 32, 64, 0.03


def write_folder(folder: Path, count: int) -> None:
    """Write images: noise over a colour of the class, a file each, a thousand per folder."""
    draw = np.random.RandomState(0)
    levels = np.arange(CLASSES)[:, None] // (1, 3, 9) % 3  # far apart, so that one pass over the images is enough
    colours = (60 + 67 * levels).reshape(CLASSES, 1, 1, 3)
    for first in range(0, count, 1000):
        (folder / f"{first // 1000:04d}").mkdir()
        noise = draw.randint(-60, 60, (1000, SIDE, SIDE, 3))
        for k in range(min(1000, count - first)):
            image = (colours[(first + k) % CLASSES] + noise[k]).astype(np.uint8)
            Image.fromarray(image).save(_path(folder, first + k), compress_level=1)


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number // 1000:04d}" / f"{number}.png"


class Folder(Dataset):
    """The images of a folder from one number on, decoded when they are read."""

    def __init__(self, folder: Path, first: int, count: int) -> None:
        self.folder, self.first, self.count = folder, first, count
        self.targets = (np.arange(first, first + count) % CLASSES).tolist()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        with Image.open(_path(self.folder, self.first + number)) as image:
            return torch.from_numpy(np.array(image)).permute(2, 0, 1), self.targets[number]


def trunk() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(1800, 32), nn.ReLU())


def memory() -> float:
    """Return the proportional set size (PSS) of this process and its children, in MB."""
    total, children = 0, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for process in ("self", *children):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        total += next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
    return total / 1024


@contextmanager
def peak_memory() -> Iterator[list[float]]:
    """Sample the memory during a block; the list holds the most that was seen."""
    found, over = [memory()], threading.Event()

    def watch() -> None:
        while not over.wait(0.25):
            found[0] = max(found[0], memory())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def plain_loop(train: Dataset, valid: Dataset, epochs: int, workers: int) -> None:
    """Train and validate as anybody would."""
    net = nn.Sequential(trunk(), nn.Linear(32, CLASSES))
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    loader = DataLoader(train, batch_size=BATCH, shuffle=True, num_workers=workers)
    for _ in range(epochs):
        net.train()
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(x.float() / 255), y).backward()
            optimizer.step()
        net.eval()
        with torch.no_grad():
            for x, y in DataLoader(valid, batch_size=1000, num_workers=workers):
                F.cross_entropy(net(x.float() / 255), y)


def learn(task: Task, epochs: int) -> Method:
    method = Method(Network(trunk(), [CLASSES], torch.zeros(2, 3, SIDE, SIDE)))
    regime = Regime(epochs=epochs, batch=BATCH, lr=LR, schedule="constant")
    method.learn(task, Trainer(regime, engine="eager", progress=False))
    return method


def cpu_seconds() -> float:
    """Return the seconds of computing of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


@contextmanager
def timed(results: dict[str, float], name: str) -> Iterator[None]:
    """Note the least seconds, and the least seconds of computing, of the blocks with this name."""
    wall, cpu = time.perf_counter(), cpu_seconds()
    yield
    gc.collect()  # ends worker processes, so that they are counted
    for key, value in ((name, time.perf_counter() - wall), (f"{name}, computing", cpu_seconds() - cpu)):
        results[key] = min(value, results.get(key, math.inf))


def measure(folder: Path, count: int, epochs: int, workers: int, rounds: int) -> dict[str, float]:
    """Train on the images of a folder, streamed, by a plain loop and from memory; the last tenths validate and test."""
    tenth, results = count // 10, {}
    train, valid, test = (Folder(folder, *part) for part in ((0, 8 * tenth), (8 * tenth, tenth), (9 * tenth, tenth)))
    learn(Task.from_arrays(0, "warm-up", *[np.zeros((20, 3, SIDE, SIDE)), np.arange(20) % CLASSES] * 2), 1)
    before = memory()
    with peak_memory() as most:
        loaders = (DataLoader(part, num_workers=workers) for part in (train, valid, test))
        with timed(results, "seconds to make the task"):
            task = Task.from_loaders(0, "folder", *loaders)
        with timed(results, "seconds streamed"):
            method = learn(task, epochs)
        results["accuracy streamed"] = evaluate(method, task.test).accuracy
    results["MB above (PSS with workers)"] = most[0] - before
    for number in range(rounds):  # in turn, because other programs take time as well
        with timed(results, "seconds of a plain loop"):
            plain_loop(train, valid, epochs, workers)
        if number + 1 < rounds:
            with timed(results, "seconds streamed"):
                learn(task, epochs)
    results["ratio"] = results["seconds streamed"] / results["seconds of a plain loop"]
    results["ratio of computing"] = results["seconds streamed, computing"] / results["seconds of a plain loop, computing"]
    with peak_memory() as most:
        whole = Task.from_dataset(0, "memory", train, test, valid=0.0)
        held = Task.from_dataset(0, "memory", valid, valid, valid=0.0).test
        order = torch.argsort(whole.train.rows)  # as from_loaders has them
        whole = Task(0, "memory", CLASSES, whole.train.part(order), held, whole.test)
        other = learn(whole, epochs)
    results["MB above in memory"] = most[0] - before
    results["accuracy in memory"] = evaluate(other, whole.test).accuracy
    pairs = zip(method.state_dict().values(), other.state_dict().values(), strict=True)
    results["same bits"] = float(all(torch.equal(one, two) for one, two in pairs))
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=20000)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), given.images)
        print(json.dumps(measure(Path(folder), given.images, given.epochs, given.workers, given.rounds), indent=1))


if __name__ == "__main__":
    main()
