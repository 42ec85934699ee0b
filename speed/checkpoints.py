"""What saved states cost a run of AlexNet-HAT on the CPU: python -m speed.checkpoints [--epochs 2] [--rounds 1].

First each kind of save by itself: how long the loop waits, and how long it takes until a thread has written it. Then runs
with and without saved states in turns (processor time of the main thread and its helpers), and the share of a run's time for
which its saves hold it up.
The runs are `hatrack run digits-and-clothes hat --network alexnet --data sample`, cut short.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hatrack import Method, Regime, Run, Task, Trainer, run
from hatrack.experiments.build import build
from hatrack.training.checkpoint import Checkpointer

MINUTES = 5.0  # the default of --save-every
LIMIT = 0.02  # of the run time


def seconds(work: Callable[[], object], times: int = 5, then: Callable[[], object] = lambda: None) -> float:
    """The median; `then` is called after every turn and not counted."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
        then()
    return statistics.median(found)


def single(spec: Run, folder: Path) -> dict[str, tuple[float, float]]:
    """Seconds and megabytes of a step and of each kind of save, while the second task is learned."""
    tasks, method = build(spec)
    checkpointer, found = Checkpointer(folder / "one.part", spec.spec), dict[str, tuple[float, float]]()
    trainer = Trainer(spec.regime)
    method.learn(tasks[0], Trainer(Regime(epochs=1)))

    def megabytes() -> float:
        return max(file.stat().st_size for file in checkpointer.folder.iterdir()) / 1e6

    def note(name: str, save: Callable[[], None]) -> None:
        found[name] = seconds(save, then=checkpointer.wait), megabytes()
        found[f"{name}, on the disk"] = seconds(lambda: (save(), checkpointer.wait())), megabytes()

    def fit(method: Method, task: Task, **how: Any) -> None:
        loop = trainer.start(method, task, **how)
        start = time.perf_counter()
        loop.epoch()  # from now on it has a best state, which is saved as well
        found["a step"] = (time.perf_counter() - start) / len(loop.losses), 0.0
        found["after a step, if nothing is saved"] = seconds(lambda: checkpointer.after_step(loop), 10_000), 0.0
        note("a fit under way", lambda: checkpointer.save_fit(loop))
        checkpointer.begin_task(2, method, trainer, {})
        checkpointer.wait()
        note("the beginning of a task", lambda: checkpointer.begin_task(2, method, trainer, {}))
        note("the end of a fit", lambda: checkpointer.save_fit(loop, ended=True))

    method.learn(tasks[1], fit)
    return found


def timed(spec: Run, out: Path | None) -> tuple[float, float]:
    """Processor seconds of a run, and the share of its time that goes into saves."""
    spent, begin, keep = [0.0], Checkpointer.begin_task, Checkpointer.save_fit

    def watched(function: Callable[..., None]) -> Callable[..., None]:
        def work(*args: Any, **how: Any) -> None:
            start = time.perf_counter()
            function(*args, **how)
            spent[0] += time.perf_counter() - start

        return work

    Checkpointer.begin_task, Checkpointer.save_fit = watched(begin), watched(keep)  # type: ignore[method-assign]
    start, processor = time.perf_counter(), time.process_time()
    try:
        run(spec, out, save_every=MINUTES)
    finally:
        Checkpointer.begin_task, Checkpointer.save_fit = begin, keep  # type: ignore[method-assign]
    return time.process_time() - processor, spent[0] / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2, help="per task; runs usually have many more")
    parser.add_argument("--rounds", type=int, default=1, help="of runs with and without saved states")
    parser.add_argument("--folder", type=Path, help="where states are written (default: the system's temporary folder)")
    words = parser.parse_args()
    torch.set_num_threads(1)
    spec = Run(
        "digits-and-clothes",
        "hat",
        network="alexnet",
        benchmark_options={"data": "sample"},
        regime=Regime(epochs=words.epochs, patience=words.epochs),
    )
    with tempfile.TemporaryDirectory(dir=words.folder) as place:
        parts = single(spec, Path(place))
        print(f"AlexNet-HAT, batch {spec.regime.batch}, one thread")
        for name, (time_of, size) in parts.items():
            print(f"{name:34s} {1e3 * time_of:10.4f} ms" + f" {size:7.1f} MB" * bool(size))
        under_way = parts["a fit under way"][0] / (60 * MINUTES)
        per_step = parts["after a step, if nothing is saved"][0] / parts["a step"][0]
        task = parts["the beginning of a task"][0] + parts["the end of a fit"][0]
        print(f"every {MINUTES:g} minutes: {under_way:.2%} of the time; after every step: {per_step:.5%}")
        print(f"per task {task:.2f} s, which is {LIMIT:.0%} of a task of {task / LIMIT:.0f} s")
        turns = [(timed(spec, None), timed(spec, Path(place) / str(k))) for k in range(words.rounds)]
    for (without, _), (total, share) in turns:
        print(
            f"a run of 6 tasks: {without:.1f} s without saved states, {total:.1f} s with; {share:.2%} of the time in saves"
        )


if __name__ == "__main__":
    main()
