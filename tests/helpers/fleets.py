"""An engine for fleets on virtual time: workers that take as long as they are told, and fail at random."""

import heapq
import json
import random
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hatrack import Record, Run
from hatrack.clusters.engine import Lost
from hatrack.clusters.jobs import Job, Result
from hatrack.clusters.mailbox import Mailbox, Message


class DriverKilled(BaseException):
    """Nobody catches it, as nobody catches a kill."""


def record_of(template: Record, spec: Run) -> str:
    """The record of another run, with the results of a template, as JSON."""
    data = template.to_dict()
    return json.dumps({**data, "name": spec.name, "spec": spec.spec})


@dataclass
class SimulatedEngine:
    """Workers on virtual time, in hours. A job that loses its worker goes to the end of the queue, as Ray's retries do.

    It saves its state every `save` hours, in a file that says how far it is, and goes on from there.
    """

    workers: int
    hours: Mapping[str, float]  # how long each run takes
    template: Record
    failures: float = 0.0  # per worker and hour
    seed: int = 0
    save: float = 0.1
    retries: int = 100
    driver_dies_at: float = float("inf")
    full: frozenset[str] = frozenset()  # nodes whose disk is full
    now: float = 0.0
    mailbox: Mailbox = field(default_factory=Mailbox)
    queue: deque = field(default_factory=deque)
    busy: list = field(default_factory=list)  # (end, number, handle, kind, node)
    ended: dict = field(default_factory=dict)
    to_the_end: Counter = field(default_factory=Counter)  # how often the work of each run came to its end
    worked: float = 0.0
    lost: Counter = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.draw, self.jobs, self.number = random.Random(self.seed), {}, 0
        self.free = [f"node-{k}" for k in range(self.workers)]

    def submit(self, job: Job, avoid: Iterable[str]) -> int:
        self.number += 1
        self.jobs[self.number] = (job, set(avoid))
        self.queue.append(self.number)
        return self.number

    def has_others(self, avoid: Iterable[str]) -> bool:
        return self.workers > len(set(avoid))

    def wait(self, handles: list[int], seconds: float) -> list[int]:
        self._start()
        if not self.ended and self.busy:
            self._next_event()
        return [handle for handle in handles if handle in self.ended]

    def result(self, handle: int) -> Result:
        found = self.ended.pop(handle)
        if found is None:
            raise Lost("its worker was lost too often")
        return found

    def take(self) -> list[Message]:
        if self.now >= self.driver_dies_at:
            raise DriverKilled
        return self.mailbox.take()

    def give(self, name: str, attempt: int, content: Any) -> None:
        self.mailbox.give(name, attempt, content)

    def stop(self) -> None:
        self.mailbox.stop()

    def room(self) -> int:
        return 2 * self.workers

    # Virtual time

    def _start(self) -> None:
        waiting = []
        while self.queue and self.free:
            handle = self.queue.popleft()
            job, avoid = self.jobs[handle]
            node = next((node for node in self.free if node not in avoid), None)
            if node is None:
                waiting.append(handle)
                continue
            self.free.remove(node)
            self._begin(handle, job, node)
        self.queue.extend(waiting)

    def _begin(self, handle: int, job: Job, node: str) -> None:
        attempt, stop = self.mailbox.begin(job.name, node)
        if stop:
            self._finish(handle, node, Result("stopped", node=node))
            return
        if node in self.full:
            self._finish(handle, node, Result("node", "No space left on device", dict(job.files), node))
            return
        state = f"{job.name}.part/task-0.safetensors"
        files = job.files if attempt == job.attempt else self._latest.get(job.name, job.files)
        done = float(files[state]) if state in files else 0.0
        fails = self.draw.expovariate(self.failures) if self.failures else float("inf")
        needs = self.hours[job.name] - done
        kind = "fails" if fails < needs else "ends"
        self.number += 1
        heapq.heappush(self.busy, (self.now + min(fails, needs), self.number, handle, kind, node, attempt, done, self.now))

    def _next_event(self) -> None:
        self.now, _, handle, kind, node, attempt, done, began = heapq.heappop(self.busy)
        job, _ = self.jobs[handle]
        self.worked += self.now - began
        saved = done + (self.now - began) // self.save * self.save
        files = {f"{job.name}.part/task-0.safetensors": repr(saved).encode()}
        if saved > done:
            self._latest[job.name] = files
            self.mailbox.post(job.name, attempt, "files", (files, list(files)))
        if kind == "ends":
            self.to_the_end[job.name] += 1
            self._finish(handle, node, Result("record", record_of(self.template, job.spec), node=node))
            return
        self.free.append(node)
        self.lost[job.name] += 1
        if self.lost[job.name] > self.retries:
            self.ended[handle] = None
        else:
            self.queue.append(handle)

    def _finish(self, handle: int, node: str, result: Result) -> None:
        self.free.append(node)
        self.ended[handle] = result

    @property
    def _latest(self) -> dict:
        return self.__dict__.setdefault("latest", {})


def names_in(out: Path, suffix: str) -> set[str]:
    return {path.stem for path in out.glob(f"*{suffix}")}
