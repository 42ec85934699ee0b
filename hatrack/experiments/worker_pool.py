"""Worker processes that carry out runs on a CPU.

A worker has a pipe to this process and shares nothing else with it. It receives a run and sends back how far it is, then its
record or an error. It ends when the pipe does. Only this process takes Ctrl-C, and asks the workers to save and stop.
"""

import multiprocessing
import signal
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from typing import Any

import torch

from hatrack.experiments.progress import Display, RunStatus
from hatrack.experiments.record import Record
from hatrack.experiments.run import Run, run
from hatrack.methods.divergence import Diverged
from hatrack.text import one_line
from hatrack.tracking.lines import Line
from hatrack.training.checkpoint import Stopped, stopping

POLL = 0.2  # seconds between two looks whether the workers are to stop
Outcome = Record | Diverged


class WorkerPool:
    """Worker processes, each with one run at a time. If a run fails, the others save and stop, and its error is raised.

    Args:
        todo: the runs by name.
        how: keyword arguments of `run`.
        display: shows how far each run is.
        found: where records go, by name; a run that diverges leaves its error there.
        notes: how the options of runs were chosen, by name.
    """

    def __init__(
        self,
        todo: Mapping[str, Run],
        how: Mapping[str, Any],
        display: Display,
        found: dict[str, Outcome],
        notes: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self.todo, self.how, self.display, self.found, self.notes = todo, how, display, found, notes
        self.numbers = {name: number for number, name in enumerate(todo)}
        self.waiting = deque(todo)
        self.workers: dict[Any, SpawnProcess] = {}  # by the pipe that leads to each
        self.errors: list[BaseException] = []
        self.stopping = False  # whether the workers were asked to save and stop

    def run(self, workers: int) -> None:
        """Carry out all runs with so many workers."""
        try:
            for _ in range(workers):
                self._start_worker(max(1, torch.get_num_threads() // workers))
            while self.workers:
                if (stopping.is_set() or self.errors) and not self.stopping:
                    self._ask_to_stop()
                for pipe in wait(list(self.workers), POLL):
                    self._receive(pipe)
        finally:
            for process in self.workers.values():  # none is left, unless something went wrong in here
                process.kill()
                process.join()
        if self.errors:
            raise min(self.errors, key=lambda error: isinstance(error, Stopped))  # what went wrong, if anything did
        if len(self.found) < len(self.todo):
            raise Stopped("stopped before the next run")

    def _start_worker(self, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, threads))
        with without_ctrl_c():
            process.start()
        theirs.close()
        self.workers[mine] = process
        self._send_next(mine)

    def _send_next(self, pipe: Any) -> None:
        """Send a worker its next run, or the end."""
        name = None if self.stopping or self.errors or not self.waiting else self.waiting.popleft()
        with suppress(OSError):  # the worker is gone; `_receive` finds out
            pipe.send(name and (name, self.todo[name], {**self.how, "tuned": self.notes.get(name)}))

    def _ask_to_stop(self) -> None:
        """Ask all workers to save and stop."""
        self.stopping = True
        for process in self.workers.values():
            process.terminate()  # a request: see `_work`

    def _receive(self, pipe: Any) -> None:
        """Take a message of a worker: progress, a record, an error, or its end."""
        try:
            name, message = pipe.recv()
        except (EOFError, OSError):
            process = self.workers.pop(pipe)
            process.join()
            if process.exitcode and not (self.stopping or stopping.is_set()):
                self.errors.append(OSError("a run's process was killed; too little memory? Try a smaller --parallel"))
            return
        if isinstance(message, tuple):
            begins, done, text, left = message
            self.display.show(self.numbers[name], done, text, left)
            if begins:
                self.display.begin(self.numbers[name], done)
            return
        if isinstance(message, Outcome):
            self.found[name] = message
            self.display.show(self.numbers[name], 1.0, "")
        else:
            self.errors.append(message)
        self._send_next(pipe)


@contextmanager
def without_ctrl_c() -> Iterator[None]:
    """Within it, processes are started that never see Ctrl-C, not even before their first line."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # which lets signals through when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(pipe: Any, threads: int) -> None:
    """The main function of a worker."""
    for name in ("SIGINT", "SIGHUP"):  # the main process takes them
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    warnings.formatwarning = one_line
    torch.set_num_threads(threads)
    threading.Thread(target=_stop_when_orphaned, daemon=True).start()
    with suppress(EOFError, OSError):  # the pipe ends with the pool
        while job := pipe.recv():
            pipe.send((job[0], _result(pipe, *job)))


def _result(pipe: Any, name: str, spec: Run, how: Mapping[str, Any]) -> Record | BaseException:
    status = RunStatus()

    def show(line: Line) -> None:
        with suppress(OSError):
            message = (line["kind"] == "run", *status(line))
            if line["kind"] != "end":
                pipe.send((name, message))

    try:
        return run(spec, **{**how, "log": (*how["log"], show)})
    except BaseException as error:
        error.add_note(traceback.format_exc())  # a traceback itself does not go through a pipe
        return error


def _stop_when_orphaned() -> None:
    """Stop if the process that started this one has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    stopping.set()
