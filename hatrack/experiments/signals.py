"""Ctrl-C, requests to end and a terminal that is closed: the runs under way save their states and stop."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from hatrack.training.checkpoint import stopping

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextmanager
def stop_by_signal() -> Iterator[None]:
    """Within it, Ctrl-C, a request to end or the end of the terminal stops the runs: the current step is finished and the
    state is saved. A second Ctrl-C does what it did outside: it raises KeyboardInterrupt, or ends the command line."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and stopping.is_set():  # other signals may come twice, to a process and to its group
            signal.signal(number, signal.SIG_IGN)  # a third does not interrupt what the second began
            outside = before[number]
            (outside if callable(outside) else signal.default_int_handler)(number, frame)
        stopping.set()

    ignored = signal.SIG_IGN  # nohup asks for it, and a run goes on when its terminal is closed
    wanted = [n for n in SIGNALS if n in (signal.SIGINT, signal.SIGTERM) or signal.getsignal(n) != ignored]
    before = {number: signal.getsignal(number) for number in wanted}
    try:
        for number in wanted:
            signal.signal(number, stop)
        yield
    finally:
        try:
            for number, handler in before.items():
                signal.signal(number, handler)
        finally:
            stopping.clear()
