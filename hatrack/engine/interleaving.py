"""Cooperative scheduling of several runs that share one GPU, in one process.

Each run is a thread with its own CUDA stream, so that the kernels of all runs overlap on the GPU. Only one thread executes
Python at a time: the one that holds the scheduler. It yields to the next thread every few steps, and whenever it has to wait
for the GPU. Each run also has its own state of torch's random generators, so that it draws the same numbers as if it ran
alone.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")
STEPS = 8  # training steps of a run before it yields to another one

# CUDA reads this when it starts. With 8 connections, the default, more than 8 streams would block each other.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

_thread = threading.local()  # `_thread.run` is the run of this thread, if it is scheduled


class _Scheduler:
    """Lets one thread run at a time, first come first served."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # makes the generators
        self.generator = torch.cuda.default_generators[device.index or 0]
        self.lock = threading.Lock()
        self.waiting: deque[threading.Semaphore] = deque()
        self.busy = False

    def acquire(self) -> None:
        """Wait until no other thread runs."""
        with self.lock:
            if not self.busy:
                self.busy = True
                own = None
            else:
                own = threading.Semaphore(0)
                self.waiting.append(own)
        if own is not None:
            own.acquire()

    def release(self) -> None:
        """Let the thread run that has waited longest."""
        with self.lock:
            if self.waiting:
                self.waiting.popleft().release()
            else:
                self.busy = False


class _ScheduledRun:
    """A run's own state of the generators and its number of steps.

    It is made when the thread is first scheduled. The generators start from the state that they had outside, however far the
    other runs are.
    """

    def __init__(self, scheduler: _Scheduler, cpu: torch.Tensor, gpu: torch.Generator) -> None:
        scheduler.acquire()
        scheduler.generator.graphsafe_set_state(gpu)
        self.scheduler, self.steps = scheduler, 0
        self.cpu, self.gpu = cpu, scheduler.generator.clone_state()
        self._set_generators()

    def _set_generators(self) -> None:
        torch.set_rng_state(self.cpu)
        self.scheduler.generator.graphsafe_set_state(self.gpu)

    def resume(self) -> None:
        """Wait until the scheduler is free, then continue with the run's own generators."""
        self.scheduler.acquire()
        self._set_generators()

    def pause(self) -> None:
        """Save the state of the generator and let another run continue."""
        self.cpu = torch.get_rng_state()
        self.scheduler.release()


def step_done() -> None:
    """Yield to another run every few steps. A fit calls this after every step; outside `run_interleaved` it does nothing."""
    run: _ScheduledRun | None = getattr(_thread, "run", None)
    if run is not None:
        run.steps += 1
        if run.steps % STEPS == 0:
            run.pause()
            run.resume()


def wait_for_gpu() -> None:
    """Wait until the GPU has finished the work of this run, while other runs continue. It is called before a value is read;
    outside `run_interleaved` it does nothing."""
    if is_interleaved():
        with others_run():
            torch.cuda.current_stream().synchronize()


def is_interleaved() -> bool:
    """Return whether this thread is a run of `run_interleaved`."""
    return getattr(_thread, "run", None) is not None


@contextmanager
def others_run() -> Iterator[None]:
    """Let other runs continue during the block; outside `run_interleaved` it does nothing."""
    run: _ScheduledRun | None = getattr(_thread, "run", None)
    if run is None:
        yield
        return
    run.pause()
    try:
        yield
    finally:
        run.resume()


def run_interleaved(runs: Sequence[Callable[[], T]], device: torch.device, workers: int) -> list[T]:
    """Execute several runs that share a GPU. After an error in one of them no other is started.

    Args:
        runs: functions without arguments.
        device: the GPU.
        workers: how many runs are under way at a time.

    Returns:
        Their results, in order. The first error is raised when all runs that were under way have ended.
    """
    scheduler = _Scheduler(device)
    outside = torch.get_rng_state(), scheduler.generator.graphsafe_get_state()
    torch.cuda.synchronize(device)
    errors: list[BaseException] = []

    def execute(run: Callable[[], T]) -> T:
        _thread.run = _ScheduledRun(scheduler, *outside)
        try:
            if errors:
                raise RuntimeError("another run failed")
            with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
                return run()
        except BaseException as error:
            errors.append(error)
            raise
        finally:
            _thread.run.pause()
            _thread.run = None

    try:
        with ThreadPoolExecutor(workers) as pool:
            futures = [pool.submit(execute, run) for run in runs]
            wait(futures)
        if errors:
            raise errors[0]
        return [future.result() for future in futures]
    finally:
        torch.set_rng_state(outside[0])
        scheduler.generator.graphsafe_set_state(outside[1])
