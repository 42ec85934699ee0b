"""Ctrl-C in the command line: the first one ends the program, and none that come after it interrupt its end."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_interrupt(last: bool) -> Iterator[None]:
    """Within it, the first Ctrl-C raises KeyboardInterrupt and further ones are ignored.

    Args:
        last: the process ends behind the block, and Ctrl-C stays ignored; otherwise the former handler is restored.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (signal.SIG_IGN, None):
        yield
        return
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN if last else before)


def _interrupt(number: int, frame: object) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt
