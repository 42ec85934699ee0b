"""Several runs, one after the other or side by side: on a CPU each in a process, on a GPU each in a thread with a stream.

A process has a pipe to talk by and shares nothing else with this one: a run comes in; how far it is, and its record or an
error go out. It ends when the pipe does. It takes no Ctrl-C: only this process does, and asks the others to save and stop.
"""

import multiprocessing
import signal
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from hatrack.engine.choice import Engine, Precision
from hatrack.engine.interleaving import side_by_side
from hatrack.engine.precision import precision_scope
from hatrack.experiments.progress import Display, describe
from hatrack.experiments.record import Record
from hatrack.experiments.run import Run, folder_of, run
from hatrack.methods.divergence import Diverged
from hatrack.text import one_line
from hatrack.training.checkpoint import Stopped, stopping
from hatrack.training.progress import ProgressEvent

SIGNALS = (signal.SIGINT, signal.SIGTERM)
LOOK = 0.2  # seconds between two looks whether the processes are to stop
Outcome = Record | Diverged
Show = Callable[[float, str], None]  # how much of a run is done, and a line that says where it stands


def carry_out(
    runs: Sequence[Run],
    out: Path,
    *,
    again: bool = False,
    device: str = "cpu",
    engine: Engine = "auto",
    precision: Precision = "tf32",
    save_every: float = 5.0,
    parallel: int = 1,
) -> list[Record]:
    """All the records, in the order of the runs; with progress on a terminal. A run that diverges does not keep the others
    from their records; when they have them, it is an error."""
    how = {"out": out, "again": again, "device": device, "engine": engine, "precision": precision, "save_every": save_every}
    names = [spec.name for spec in runs]
    todo, found = dict(zip(names, runs, strict=True)), dict[str, Outcome]()
    workers = min(parallel, sum(again or not folder_of(spec, out).done for spec in todo.values()))
    with stop_by_signal(), Display(len(todo)) as display:
        work = [
            partial(_one, name, spec, how, partial(display.show, number), found)
            for number, (name, spec) in enumerate(todo.items())
        ]
        try:
            if workers < 2:
                for item in work:
                    item()
            elif torch.device(device).type == "cuda":
                with precision_scope(precision, torch.device(device)):  # until the last is done: it holds for all threads
                    _in_threads(work, torch.device(device), workers)
            else:
                WorkerPool(todo, how, display, found).work(workers)
        except Stopped as error:
            left = [spec for name, spec in todo.items() if name not in found]
            raise Stopped(_how_to_go_on(str(error), left, len(todo), out, again)) from None
        except KeyboardInterrupt:
            raise Stopped("stopped at once; the same command goes on from what was saved before") from None
    return _records([found[name] for name in names], out)


def _records(outcomes: Sequence[Outcome], out: Path) -> list[Record]:
    records = [outcome for outcome in outcomes if isinstance(outcome, Record)]
    diverged = [outcome for outcome in outcomes if isinstance(outcome, Diverged)]
    if diverged:
        others = [f"{len(records)} of {len(outcomes)} runs have their records in {out}"] if records else []
        raise Diverged("\n".join([*map(str, diverged), *others]))
    return records


def _one(name: str, spec: Run, how: Mapping[str, Any], show: Show, found: dict[str, Outcome]) -> None:
    def progress(event: ProgressEvent) -> None:
        show(*describe(spec, event))

    try:
        found[name] = run(spec, **how, progress=progress)
    except Diverged as error:
        found[name] = Diverged(str(error))  # its traceback would hold the whole run in memory
    show(1.0, "")


# Stopping


def _in_threads(work: Sequence[Callable[[], None]], device: torch.device, workers: int) -> None:
    """Side by side on a GPU. If one fails, the others save and stop."""

    def or_stop_all(item: Callable[[], None]) -> None:
        try:
            item()
        except BaseException:
            stopping.set()
            raise

    try:
        side_by_side([partial(or_stop_all, item) for item in work], device, workers)
    except Stopped:
        raise
    except BaseException:
        stopping.clear()  # nobody asked for an end: later runs are not meant
        raise


@contextmanager
def stop_by_signal() -> Iterator[None]:
    """Ctrl-C or a request to end finishes the step, saves and stops; a second Ctrl-C stops at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _stop) for number in SIGNALS}
    try:
        yield
    finally:
        stopping.clear()
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: object) -> None:
    if number == signal.SIGINT and stopping.is_set():  # other signals may come twice, to a process and to its group
        raise KeyboardInterrupt
    stopping.set()


def _how_to_go_on(said: str, left: Sequence[Run], count: int, out: Path, again: bool) -> str:
    """In one line. With `again`, those that have not begun are marked, so that they are not taken for finished."""
    for spec in left if again else ():
        with suppress(ValueError, OSError), folder_of(spec, out) as folder:
            folder.start_anew()
    command = "the same command" + " without --again" * again
    if count == 1:
        return f"{said}; {command} goes on from there"
    return f"stopped, and saved: {count - len(left)} of {count} runs are finished, and {command} goes on with the others"


# Processes


class WorkerPool:
    """Processes that carry out runs, one at a time each. If one fails, the others save and stop, and the error is raised."""

    def __init__(self, todo: Mapping[str, Run], how: Mapping[str, Any], display: Display, found: dict[str, Outcome]) -> None:
        self.todo, self.how, self.display, self.found = todo, how, display, found
        self.numbers = {name: number for number, name in enumerate(todo)}
        self.waiting = deque(todo)
        self.workers: dict[Any, SpawnProcess] = {}  # by the pipe that leads to each
        self.errors: list[BaseException] = []
        self.asked = False  # to save and stop

    def work(self, workers: int) -> None:
        try:
            for _ in range(workers):
                self._start_worker(max(1, torch.get_num_threads() // workers))
            while self.workers:
                if (stopping.is_set() or self.errors) and not self.asked:
                    self._ask_to_stop()
                for pipe in wait(list(self.workers), LOOK):
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
        with _without_ctrl_c():
            process.start()
        theirs.close()
        self.workers[mine] = process
        self._send_next(mine)

    def _send_next(self, pipe: Any) -> None:
        """The next run, or nothing more."""
        name = None if self.asked or self.errors or not self.waiting else self.waiting.popleft()
        with suppress(OSError):  # it is gone, which shows when it is next heard
            pipe.send(name and (name, self.todo[name], self.how))

    def _ask_to_stop(self) -> None:
        self.asked = True
        for process in self.workers.values():
            process.terminate()  # a request: see `_work`

    def _receive(self, pipe: Any) -> None:
        try:
            name, news = pipe.recv()
        except (EOFError, OSError):
            process = self.workers.pop(pipe)
            process.join()
            if process.exitcode and not (self.asked or stopping.is_set()):
                self.errors.append(OSError("a run's process was killed; too little memory? Try a smaller --parallel"))
            return
        if isinstance(news, tuple):
            self.display.show(self.numbers[name], *news)
            return
        if isinstance(news, Outcome):
            self.found[name] = news
            self.display.show(self.numbers[name], 1.0, "")
        else:
            self.errors.append(news)
        self._send_next(pipe)


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """A process that starts within it never sees Ctrl-C, not even before its first line."""
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
    """What a process of the team does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    warnings.formatwarning = one_line
    torch.set_num_threads(threads)
    threading.Thread(target=_stop_as_an_orphan, daemon=True).start()
    with suppress(EOFError, OSError):  # the pipe ends with the team
        while job := pipe.recv():
            pipe.send((job[0], _result(pipe, *job)))


def _result(pipe: Any, name: str, spec: Run, how: Mapping[str, Any]) -> Record | BaseException:
    def progress(event: ProgressEvent) -> None:
        with suppress(OSError):
            pipe.send((name, describe(spec, event)))

    try:
        return run(spec, **how, progress=progress)
    except BaseException as error:
        error.add_note(traceback.format_exc())  # a traceback itself does not go through a pipe
        return error


def _stop_as_an_orphan() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    stopping.set()
