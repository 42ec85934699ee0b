"""Cooperative scheduling of several runs that share one GPU, in one process.

Each run is a thread with its own CUDA stream, so that the kernels of all runs overlap on the GPU. Only one thread executes
Python at a time: the one that holds the scheduler. It yields to the next thread every few steps, and whenever it has to wait
for the GPU. Each run also has its own state of torch's random generators, so that it draws the same numbers as if it ran
alone.
"""

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")
LOOK = 0.5  # seconds after which the thread that waits for the runs looks whether a signal has come
STEPS = 8  # training steps of a run before it yields to another one

# CUDA reads this when it starts. With 8 connections, the default, more than 8 streams would block each other.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

_thread = threading.local()  # `_thread.run` is the run of this thread, if it is scheduled


class _Waiting(NamedTuple):
    """A run that waits for stacked steps: whether they are done, and what wakes it."""

    done: Callable[[], bool]
    semaphore: threading.Semaphore


class _Scheduler:
    """Lets one thread run at a time, first come first served."""

    def __init__(self, device: torch.device, workers: int, kinds: Sequence[Hashable], *, stack: bool) -> None:
        self.generator: torch.Generator | None = None
        if device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]  # makes the generators
            self.generator = torch.cuda.default_generators[device.index or 0]
        self.lock = threading.Lock()
        self.waiting: deque[threading.Semaphore] = deque()
        self.busy = False
        self.workers, self.left = workers, len(kinds)  # how many runs are under way at a time, and how many have not ended
        self.kinds = Counter(kinds)  # how many runs that have not ended there are of each kind
        self.stacks: list[Any] | None = [] if stack else None  # see engine/stack.py; None if runs are not stacked
        self.together: deque[_Waiting] = deque()  # the runs that wait for a stacked step
        self.apart = 0  # how many runs have a fit under way that is not stacked

    def all_wait(self, own: int = 0) -> bool:
        """Return whether all runs under way that are stacked wait for a stacked step, `own` more than noted."""
        return len(self.together) + own >= min(self.workers, self.left) - self.apart

    def wake(self, done: Callable[[_Waiting], bool]) -> None:
        """Wake the runs that wait for a stacked step and that `done` is true of."""
        for waiting in [waiting for waiting in self.together if done(waiting)]:
            self.together.remove(waiting)
            waiting.semaphore.release()

    def wake_driver(self) -> None:
        """If all wait for each other, wake one, which does the steps of all."""
        if self.together and self.all_wait():
            self.together.popleft().semaphore.release()

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

    def __init__(self, scheduler: _Scheduler, cpu: torch.Tensor, gpu: torch.Generator | None, kind: Hashable = None) -> None:
        scheduler.acquire()
        self.scheduler, self.steps, self.cpu, self.gpu, self.kind = scheduler, 0, cpu, gpu, kind
        if scheduler.generator is not None and gpu is not None:
            scheduler.generator.graphsafe_set_state(gpu)
            self.gpu = scheduler.generator.clone_state()
        self._set_generators()

    def _set_generators(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.scheduler.generator is not None and self.gpu is not None:
            self.scheduler.generator.graphsafe_set_state(self.gpu)

    def resume(self) -> None:
        """Wait until the scheduler is free, then continue with the run's own generators."""
        self.scheduler.acquire()
        self._set_generators()

    def pause(self) -> None:
        """Save the state of the generator and let another run continue."""
        self.cpu = torch.get_rng_state()
        self.scheduler.release()

    def wait_together(self, done: Callable[[], bool], drive: Callable[[], None]) -> None:
        """Wait until steps are done that several runs do together: see `wait_together`."""
        scheduler = self.scheduler
        while not done():
            if scheduler.all_wait(own=1):
                drive()
                scheduler.wake(lambda other: other.done())
                self.pause()  # others may run apart
            else:
                own = threading.Semaphore(0)
                scheduler.together.append(_Waiting(done, own))
                self.pause()
                own.acquire()
            self.resume()

    def stand_apart(self, *, apart: bool) -> None:
        """Let the runs that are stacked go on without this one, or wait for it again."""
        with self.scheduler.lock:
            self.scheduler.apart += 1 if apart else -1
        if apart:
            self.scheduler.wake_driver()

    def end(self) -> None:
        """Let others continue for good."""
        self.scheduler.left -= 1
        self.scheduler.kinds[self.kind] -= 1
        self.scheduler.wake_driver()
        self.pause()


def stacking() -> list[Any] | None:
    """Return the stacks of the runs that are stacked with this one; None if this thread is no such run."""
    run: _ScheduledRun | None = getattr(_thread, "run", None)
    return None if run is None else run.scheduler.stacks


def lane_count() -> int:
    """Return how many runs of this one's kind may be under way together from now on, itself included."""
    run: _ScheduledRun = _thread.run
    return max(1, min(run.scheduler.workers, run.scheduler.kinds[run.kind]))


def wait_together(done: Callable[[], bool], drive: Callable[[], None]) -> None:
    """Wait until steps are done that several runs do together, while other runs continue.

    When all runs that are under way wait, one of them calls `drive`, again and again, until steps of some of them are done.

    Args:
        done: whether the steps of this run are done.
        drive: does at least one step of every run that waits.
    """
    run: _ScheduledRun = _thread.run
    run.wait_together(done, drive)


def stand_apart(*, apart: bool) -> None:
    """Let the runs that are stacked go on without this one, or wait for it again, which it may say while it is not its turn;
    outside of them it does nothing."""
    if stacking() is not None:
        _thread.run.stand_apart(apart=apart)


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
    run: _ScheduledRun | None = getattr(_thread, "run", None)
    if run is not None and run.scheduler.generator is not None:
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


def run_interleaved(
    runs: Sequence[Callable[[], T]],
    device: torch.device,
    workers: int,
    *,
    stack: bool = False,
    kinds: Sequence[Hashable] | None = None,
) -> list[T]:
    """Execute several runs that share a GPU, or a CPU. After an error in one of them no other is started.

    Args:
        runs: functions without arguments.
        device: the GPU or the CPU.
        workers: how many runs are under way at a time.
        stack: do the steps of runs that have the same form as one step.
        kinds: of each run what it has in common with those whose steps are likely to have the same form: a stack has a
            place for each of them. None: all runs are of one kind.

    Returns:
        Their results, in order. The first error is raised when all runs that were under way have ended.
    """
    workers = min(workers, len(runs))
    kinds = [""] * len(runs) if kinds is None else kinds
    scheduler = _Scheduler(device, workers, kinds, stack=stack)
    generator = scheduler.generator
    outside = torch.get_rng_state(), None if generator is None else generator.graphsafe_get_state()
    if generator is not None:
        torch.cuda.synchronize(device)
    errors: list[BaseException] = []

    def execute(run: Callable[[], T], kind: Hashable) -> T:
        _thread.run = _ScheduledRun(scheduler, *outside, kind)
        try:
            if errors:
                raise RuntimeError("another run failed")
            with nullcontext() if generator is None else torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
                return run()
        except BaseException as error:
            errors.append(error)
            raise
        finally:
            _thread.run.end()
            _thread.run = None

    try:
        with ThreadPoolExecutor(workers) as pool:
            futures = [pool.submit(execute, run, kind) for run, kind in zip(runs, kinds, strict=True)]
            while wait(futures, timeout=LOOK).not_done:
                pass  # Python executes the handler of a signal in this thread, and only when it is awake
        if errors:
            raise errors[0]
        return [future.result() for future in futures]
    finally:
        torch.set_rng_state(outside[0])
        if generator is not None and outside[1] is not None:
            generator.graphsafe_set_state(outside[1])
