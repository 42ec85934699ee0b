"""A whole run from start to end, the authors' way and ours: the ten tasks of CIFAR with HAT, every evaluation included.

python -m speed.whole_run --epochs 30 --device cuda                    # minutes on a GPU; needs cifar10 and cifar100
python -m speed.whole_run --epochs 30 --device cuda --authors-epochs 3 # the authors' epochs measured on 3 of 30 and scaled

Ours is `hatrack run cifar hat` in a process of its own, once with an empty cache of compiled code and once with that code.
Both find Python's bytecode of torch and of this library, as after any first use, also where the environment forbids to
write it.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from hatrack.benchmarks import BENCHMARKS
from hatrack.experiments.record import Record
from hatrack.experiments.record_parts import Seconds
from hatrack.tasks.device import all_to_device
from hatrack.tasks.split import Split
from speed.authors import Authors, Data, GatedAlexNet


def everything(split: Split) -> Data:
    """Return all inputs and labels of a split."""
    return split.inputs(torch.arange(len(split), device=split.y.device)), split.y


def authors(epochs: int, measured: int, device: str) -> float:
    """Return the seconds of the authors' run of so many epochs per task; `measured` of them are run, the rest inferred."""
    tasks = all_to_device(BENCHMARKS["cifar"](0), device)
    net = GatedAlexNet([task.classes for task in tasks]).to(device)
    loop, total = Authors(net), 0.0
    for task in tasks:
        train, valid = everything(task.train), everything(task.valid)
        began = time.perf_counter()
        for _ in range(measured):
            loop.epoch(task.index, train, valid)
        total += (time.perf_counter() - began) * epochs / measured
        began = time.perf_counter()
        loop.finish(task.index)
        for other in tasks[: task.index + 1]:  # every task so far on its test data
            loop.evaluate(other.index, *everything(other.test))
        total += time.perf_counter() - began
    return total


MODULES = "torch._inductor.compile_fx, hatrack.experiments.ahead, hatrack.cli.execute, hatrack.methods.hat"


def with_bytecode(folder: Path) -> dict[str, str]:
    """Return an environment in which Python finds the bytecode of what a run imports, which is written now,
    to a folder unless the environment names one."""
    found = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    found.setdefault("PYTHONPYCACHEPREFIX", str(folder))
    subprocess.run([sys.executable, "-c", f"import {MODULES}"], check=True, env=found)
    return found


def ours(epochs: int, device: str, environment: dict[str, str]) -> tuple[float, Seconds]:
    """Return the seconds of our run, from the start of its process to its end, and what its record says of them."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "hatrack", "run", "cifar", "hat", "--epochs", str(epochs), "--seed", "0"]
        began = time.perf_counter()
        subprocess.run(
            [*command, "--device", device, "--out", out],
            check=True,
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        seconds = time.perf_counter() - began
        return seconds, Record.load(next(Path(out).glob("*.json"))).seconds


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--authors-epochs", type=int, default=0, help="of each task that are run; 0: all")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        environment = with_bytecode(Path(cache) / "bytecode") | {"TORCHINDUCTOR_CACHE_DIR": str(Path(cache) / "code")}
        cold, warm = (ours(given.epochs, given.device, environment) for _ in range(2))
    theirs = authors(given.epochs, given.authors_epochs or given.epochs, given.device)
    print("| whole run of cifar, HAT, seed 0 | seconds | times faster | first task | other tasks | besides tasks |")
    print(f"|---|---|---|---|---|---|\n| the authors' way | {theirs:.1f} | 1.0 | | | |")
    runs = {"hatrack, nothing compiled yet": cold, "hatrack": warm}
    for name, (seconds, inside) in runs.items():
        learn = inside.learn or [0.0]
        print(f"| {name} | {seconds:.1f} | {theirs / seconds:.1f} | {row(learn[0], sum(learn[1:]), seconds - sum(learn))} |")
    parts = dict.fromkeys(part for _, inside in runs.values() for part in inside.parts or {})
    print(f"\n| seconds of | {' | '.join(parts)} | start and end of the process |\n|{'---|' * (len(parts) + 2)}")
    for name, (seconds, inside) in runs.items():
        spent = [(inside.parts or {}).get(part, 0.0) for part in parts]
        print(f"| {name} | {row(*spent, seconds - (inside.total or 0.0))} |", flush=True)


def row(*seconds: float) -> str:
    """Return cells of a table."""
    return " | ".join(f"{value:.1f}" for value in seconds)


if __name__ == "__main__":
    main()
