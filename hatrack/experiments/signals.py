"""Ctrl-C and requests to end: the runs under way save their states and stop."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hatrack.training.checkpoint import stopping

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_by_signal() -> Iterator[None]:
    """Within it, Ctrl-C or a request to end lets the current step finish, saves the state and stops; a second Ctrl-C stops
    at once."""
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
