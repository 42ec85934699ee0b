"""Helper processes that compile steps while training goes on in this process.

A helper leaves its code in the compiler's cache on disk, where this process finds it. Results never depend on a helper: if
it fails, or if the step that it compiled is not the one that a fit has, the fit compiles its step itself.
"""

import getpass
import hashlib
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from hatrack.engine.interleaving import others_run, stand_apart

COUNT = min(6, ((os.cpu_count() or 1) - 1) // 2)  # helpers at a time; with few processors they would only slow training down
UNSAFE = r'[\\/:*?"<>|]'  # characters that the compiler's cache has not in the name of its folder
PATIENCE = 300.0  # seconds to wait for a helper; then the fit compiles its step itself
ASK = 0.2  # seconds after which it is asked again whether somebody who waits for a helper has given up

_jobs: dict[str, threading.Event] = {}  # by name: set when the helper has ended it, whatever came of it
_queue: deque["_Job"] = deque()  # the jobs that no helper has begun
_working = 0  # how many helpers there are
_lock = threading.Lock()  # of the queue and the number of helpers
_main = threading.Lock()  # of what processes take for the user's script


class _Job(NamedTuple):
    """What a helper does: it calls a function with an argument."""

    name: str
    function: Callable[[Any], None]
    argument: Any


def start(name: str, function: Callable[[Any], None], argument: Any) -> None:
    """Call a function in a helper process, as soon as there is a place for it. A job that was given before is not repeated.

    Args:
        name: names the job: see `wait`.
        function: a function of a module, not of the user's script.
        argument: what it is called with; it must be possible to send it to another process.
    """
    global _working
    if name in _jobs:
        return
    _jobs[name] = threading.Event()
    with _lock:
        _queue.append(_Job(name, function, argument))
        if _working < max(1, COUNT):
            _working += 1
            threading.Thread(target=_supervise, daemon=True).start()


def _supervise() -> None:
    """Let one helper do jobs until none is left. A process does one after the other, since it takes seconds to start."""
    global _working
    helper: Connection | None = None
    while True:
        with _lock:
            if not _queue:
                _working -= 1
                break
            job = _queue.popleft()
        try:
            helper = _ask(job, helper or _start_process())
        except Exception:  # whatever it is, a fit can compile its own step
            helper = None
        finally:
            _jobs[job.name].set()
    if helper is not None:
        helper.close()  # then the process ends


def _start_process() -> Connection:
    """Start a helper; return the connection to it."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with there, without_main():
        context.Process(target=_work, args=(there,), daemon=True).start()  # it ends with this process
    return here


def _ask(job: _Job, helper: Connection) -> Connection | None:
    """Let a helper do a job. Return the helper; None if it has failed, which ends it."""
    try:
        helper.send((job.function, job.argument))
        helper.recv()
    except (EOFError, OSError):
        helper.close()
        return None
    remember(job.name)
    return helper


@contextmanager
def without_main() -> Iterator[None]:
    """Within it, processes are started that do not import the user's script, which may not be guarded by `__name__`."""
    with _main:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def _work(jobs: Connection) -> None:
    """The main function of a helper. Nothing that it prints is shown. An error in a job ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that it helps
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    warnings.simplefilter("ignore")
    threading.Thread(target=_end_when_orphaned, daemon=True).start()
    with suppress(EOFError):  # there are no more jobs
        while True:
            function, argument = jobs.recv()
            function(argument)
            jobs.send(None)


def _end_when_orphaned() -> None:
    """End at once if the process that started this one was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def wait(name: str, given_up: Callable[[], bool] = lambda: False) -> None:
    """Wait until the helper with this job has ended, if there is one; other runs go on, also those that are stacked.

    Args:
        name: names the job.
        given_up: whether nobody needs its code any more; it is asked a few times a second.
    """
    job = _jobs.get(name)
    if job is not None and not job.is_set():
        stand_apart(apart=True)
        with others_run():
            until = time.monotonic() + PATIENCE
            while not job.wait(min(ASK, PATIENCE)) and time.monotonic() < until and not given_up():
                pass
            # Before it is this run's turn, so that all runs that wait for this job take their first step together.
            stand_apart(apart=False)


def _mark(name: str) -> Path:
    """Return the file that says that the code of a job is in the compiler's cache; it lies in the folder of the cache."""
    return _cache_folder() / "hatrack" / hashlib.sha256(name.encode()).hexdigest()[:32]


def _cache_folder() -> Path:
    """Return the folder of the compiler's cache. `torch._inductor` has a function for it, but takes seconds to import."""
    if given := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return Path(given).absolute()
    try:
        user = getpass.getuser()
    except (KeyError, ImportError, OSError):  # there is no such user in a container
        user = f"uid_{os.getuid()}"
    return Path(tempfile.gettempdir()) / f"torchinductor_{re.sub(UNSAFE, '_', user)}"


def is_known(name: str) -> bool:
    """Return whether the code of a job was left in the compiler's cache before. It is a hint that saves processes."""
    return _mark(name).exists()


def remember(name: str) -> None:
    """Note that the code of a job is in the compiler's cache."""
    with suppress(OSError):
        _mark(name).parent.mkdir(parents=True, exist_ok=True)
        _mark(name).touch()
