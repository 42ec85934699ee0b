"""Ctrl-C in the command line, where no run is under way or for the second time: the process ends at once.

It does not raise an exception: one that comes in the middle of an import, of torch's code in C++ or of a lock leaves behind
what nobody can clear up. Whatever is written is written so that a process may be killed at any moment.

The program imports this module first, and it imports little itself: before that, Ctrl-C ends in a traceback.
"""

import os
import signal
import sys
import threading
from contextlib import suppress
from typing import NoReturn

STOPPED = 130  # the exit code
SHOW_CURSOR = "\n\x1b[?25h"  # for terminals: below the bar


def end_at_ctrl_c() -> None:
    """From now on Ctrl-C ends the process, with one line and exit code 130; where it is ignored it stays so."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end)


def ignore_ctrl_c() -> None:
    """From now on Ctrl-C does nothing: the process is about to end, with a line of its own."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _end(number: int, frame: object) -> NoReturn:
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with suppress(Exception):  # multiprocessing may not be imported; then there are no children
            for process in sys.modules["multiprocessing"].active_children():  # runs in parallel
                process.kill()
        with suppress(Exception):
            text = (
                SHOW_CURSOR * sys.stderr.isatty()
                + "hatrack: stopped at once; a run goes on with the same command, from what was saved before\n"
            )
            os.write(2, text.encode())  # `print` would fail if it is what was interrupted
    finally:
        os._exit(STOPPED)
