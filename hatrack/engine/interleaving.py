"""Several runs in one process: they take turns on the host while their work goes on side by side on one GPU.

Each run is a thread with a stream of its own, and with its own state of torch's random generators, so that it draws the
same numbers as if it were alone. Only the thread whose turn it is runs Python; it passes the turn on every few steps, and
whenever it has to wait for the GPU.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

T = TypeVar("T")
STEPS = 8  # steps of one run before another's turn

# Read when CUDA starts, so it is set before. With 8, as by default, more streams than that wait for each other.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

_here = threading.local()


class _Turns:
    """Whose turn it is, first come first served."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # makes the generators
        self.generator = torch.cuda.default_generators[device.index or 0]
        self.guard = threading.Lock()
        self.waiting: deque[threading.Semaphore] = deque()
        self.taken = False

    def take(self) -> None:
        with self.guard:
            if not self.taken:
                self.taken = True
                mine = None
            else:
                mine = threading.Semaphore(0)
                self.waiting.append(mine)
        if mine is not None:
            mine.acquire()

    def give(self) -> None:
        with self.guard:
            if self.waiting:
                self.waiting.popleft().release()
            else:
                self.taken = False


class _Place:
    """A run's own generators and count of steps. It is made when its thread first has a turn, and begins with the
    generators as they were outside, however far the other runs are."""

    def __init__(self, turns: _Turns, cpu: torch.Tensor, gpu: torch.Generator) -> None:
        turns.take()
        turns.generator.graphsafe_set_state(gpu)
        self.turns, self.steps = turns, 0
        self.cpu, self.gpu = cpu, turns.generator.clone_state()
        self._set_generators()

    def _set_generators(self) -> None:
        torch.set_rng_state(self.cpu)
        self.turns.generator.graphsafe_set_state(self.gpu)

    def enter(self) -> None:
        self.turns.take()
        self._set_generators()

    def leave(self) -> None:
        self.cpu = torch.get_rng_state()
        self.turns.give()


def step_done() -> None:
    """After every step: now and then it is another run's turn."""
    place: _Place | None = getattr(_here, "place", None)
    if place is not None:
        place.steps += 1
        if place.steps % STEPS == 0:
            place.leave()
            place.enter()


def wait_for_gpu() -> None:
    """Before a value is read: others have their turn while the GPU works."""
    place: _Place | None = getattr(_here, "place", None)
    if place is not None:
        place.leave()
        try:
            torch.cuda.current_stream().synchronize()
        finally:
            place.enter()


def side_by_side(work: Sequence[Callable[[], T]], device: torch.device, workers: int) -> list[T]:
    """The results of all, in order. After an error none is begun; it is raised when those under way have ended."""
    turns = _Turns(device)
    outside = torch.get_rng_state(), turns.generator.graphsafe_get_state()
    torch.cuda.synchronize(device)
    errors: list[BaseException] = []

    def one(item: Callable[[], T]) -> T:
        _here.place = _Place(turns, *outside)
        try:
            if errors:
                raise RuntimeError("another run failed")
            with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
                return item()
        except BaseException as error:
            errors.append(error)
            raise
        finally:
            _here.place.leave()
            _here.place = None

    try:
        with ThreadPoolExecutor(workers) as pool:
            futures = [pool.submit(one, item) for item in work]
            wait(futures)
        if errors:
            raise errors[0]
        return [future.result() for future in futures]
    finally:
        torch.set_rng_state(outside[0])
        turns.generator.graphsafe_set_state(outside[1])
