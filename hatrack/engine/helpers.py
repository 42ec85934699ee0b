"""Helper processes that compile steps while training goes on in this process.

A helper leaves its code in the compiler's cache on disk, where this process finds it. Results never depend on a helper: if
it fails, or if the step that it compiled is not the one that a fit has, the fit compiles its step itself.
"""

import hashlib
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from hatrack.engine.interleaving import others_run

COUNT = min(6, ((os.cpu_count() or 1) - 1) // 2)  # helpers at a time; with few processors they would only slow training down
PATIENCE = 300.0  # seconds to wait for a helper; then the fit compiles its step itself

_jobs: dict[str, threading.Event] = {}  # by name: set when the helper has ended, whatever came of it
_places = threading.Semaphore(max(1, COUNT))


def start(name: str, entry: str, message: str) -> None:
    """Start a helper process, as soon as there is a place for it. A job that was given before is not given again.

    Args:
        name: names the job: see `wait`.
        entry: the function that the process calls, "module:function", without arguments.
        message: one line, which the process reads from its standard input. The input ends when this process does.
    """
    if name not in _jobs and sys.executable:
        _jobs[name] = threading.Event()
        threading.Thread(target=_supervise, args=(name, entry, message), daemon=True).start()


def _supervise(name: str, entry: str, message: str) -> None:
    module, _, function = entry.partition(":")
    command = [sys.executable, "-c", f"from {module} import {function}; {function}()"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    null = subprocess.DEVNULL
    try:
        with (
            _places,
            suppress(OSError),
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=null, stderr=null, env=env, text=True, start_new_session=True
            ) as process,  # a session of its own: Ctrl-C is for this process
        ):
            assert process.stdin is not None
            process.stdin.write(message + "\n")
            process.stdin.flush()
            if process.wait() == 0:
                remember(name)
    finally:
        _jobs[name].set()


def wait(name: str) -> None:
    """Wait until the helper with this job has ended, if there is one; other runs on the GPU go on."""
    job = _jobs.get(name)
    if job is not None and not job.is_set():
        with others_run():
            job.wait(PATIENCE)


def _mark(name: str) -> Path:
    """Return the file that says that the code of a job is in the compiler's cache; it lies in the folder of the cache."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # only runs that compile need it

    return Path(cache_dir()) / "hatrack" / hashlib.sha256(name.encode()).hexdigest()[:32]


def is_known(name: str) -> bool:
    """Return whether the code of a job was left in the compiler's cache before. It is a hint that saves helpers."""
    return _mark(name).exists()


def remember(name: str) -> None:
    """Note that the code of a job is in the compiler's cache."""
    with suppress(OSError):
        _mark(name).parent.mkdir(parents=True, exist_ok=True)
        _mark(name).touch()
