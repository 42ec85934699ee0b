"""Seeds stacked into one step, beside seeds side by side: python -m speed.stacked [--device cuda] [--seeds 32].

AlexNet, HAT (or `--method`), batch 64, while the second task is learned. Steps per second of all seeds together, over whole
epochs with their validation, in the time when all seeds are under way.
"""

import argparse
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from hatrack import Method, Regime, Task, Trainer
from hatrack.engine.choice import Engine, Precision
from hatrack.engine.interleaving import run_interleaved
from hatrack.engine.precision import precision_scope
from hatrack.tasks.batches import count_batches
from speed.clock import WARM
from speed.contest import HAT, Pair, together
from speed.loops import BATCH


def steps_per_second(
    pair: Pair,
    seeds: int,
    device: torch.device,
    precision: Precision,
    *,
    stack: bool,
    images: int,
    epochs: int,
    engine: Engine = "compiled",
    profile: bool = False,
) -> tuple[float, str]:
    """Return the steps per second of several seeds together, and a table of kernels if a profile is wanted."""
    tasks = pair.tasks(images, 0.15, device, raw=True)
    stamps: list[list[float]] = [[] for _ in range(seeds)]
    methods = [pair.prepare(tasks, seed) for seed in range(seeds)]
    marks = threading.Event(), threading.Event(), threading.Event()  # an epoch to profile begins, may begin, has ended

    def work(seed: int) -> None:
        def fit(method: Method, task: Task, **how: Any) -> None:
            loop = Trainer(Regime(clip=pair.clip), seed=seed, engine=engine).start(method, task, **how)
            for number in range(WARM + epochs):
                if profile and seed == 0 and number == WARM:
                    marks[0].set()
                    marks[1].wait()
                loop.epoch()  # it ends with a wait for its own work on the GPU
                stamps[seed].append(time.perf_counter())
                if seed == 0 and number == WARM:
                    marks[2].set()
            engines.add(loop.close().engine)

        with precision_scope(precision, device):
            methods[seed].learn(tasks[-1], fit)

    engines: set[str] = set()
    runs = [lambda seed=seed: work(seed) for seed in range(seeds)]
    with precision_scope(precision, device), ThreadPoolExecutor(1) as pool:
        future = pool.submit(run_interleaved, runs, device, seeds, stack=stack)
        table = _profile(marks) if profile else ""
        future.result()
    if stack and any("stacked" not in engine for engine in engines):
        raise RuntimeError(f"the steps were not stacked but {engines}")
    steps = count_batches(len(tasks[-1].train), BATCH)
    return steps * together(stamps, WARM), table


def _profile(marks: Sequence[threading.Event]) -> str:
    """Return a table of the kernels that took longest in an epoch. A profiler must be started in the main thread."""
    begins, may_begin, ended = marks
    begins.wait(300)
    kind = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kind.CUDA if torch.cuda.is_available() else kind.CPU]) as profiler:
        may_begin.set()
        ended.wait(300)
    order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    return str(profiler.key_averages().table(sort_by=order, row_limit=45, max_name_column_width=90))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--method", default=HAT.method)
    parser.add_argument("--seeds", type=int, default=32, help="of the stack")
    parser.add_argument("--beside", type=int, default=10, help="seeds side by side; 0: none")
    parser.add_argument("--images", type=int, default=50_000, help="of a task, 15 %% of them for validation")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--engine", default="compiled")
    parser.add_argument("--precisions", default="bfloat16,tf32", help="by commas")
    parser.add_argument("--profile", action="store_true", help="show the kernels of an epoch of the stack")
    words = parser.parse_args()
    device = torch.device(words.device)
    pair = replace(HAT, method=words.method)
    how = {"images": words.images, "epochs": words.epochs, "engine": words.engine}
    for precision in words.precisions.split(","):
        for seeds, stack in ((words.seeds, True), (words.beside, False)):
            if not seeds or (device.type == "cpu" and not stack):
                continue
            began = time.perf_counter()
            rate, table = steps_per_second(
                pair, seeds, device, precision, stack=stack, profile=words.profile and stack, **how
            )
            seconds = time.perf_counter() - began
            memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
            name = "stacked" if stack else "side by side"
            print(f"{precision:9s} {seeds:3d} seeds {name:13s} {rate:9,.0f} steps per second", end=" ")
            print(f"({seconds:.0f} s, {memory:.1f} GiB)")
            print(table, flush=True)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
