"""What is said when something goes wrong: one line on standard error, and the exit code.

Expected errors, of a user's words, files and computer, end with exit code 2. Any other error is a defect of ours: its
traceback goes to a log file, which the line names, and the exit code is 1. $HATRACK_TRACEBACK shows tracebacks of both.
"""

import os
import re
import shlex
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from platform import platform, python_version

import click

from hatrack._version import __version__
from hatrack.cli.interrupts import STOPPED
from hatrack.clusters.request import Submitted
from hatrack.methods.divergence import Diverged
from hatrack.text import printable, say, shorten

DEFECT, MISTAKE = 1, 2  # exit codes, besides STOPPED
EXPECTED = (ValueError, IndexError, OSError, MemoryError, Diverged)  # of a user's words, files and computer


TOO_LARGE = re.compile("size calculation overflow|multiplication overflow|[Ii]nvalid buffer size|not enough memory")


class Interrupted(Exception):  # noqa: N818
    """The runs saved their states and stopped, because somebody asked for it."""


def report(error: BaseException, words: Sequence[str] = ()) -> int:
    """Print what went wrong on standard error.

    Args:
        error: what was raised by a command.
        words: the command line.

    Returns:
        The exit code.

    Raises:
        The error itself, if $HATRACK_TRACEBACK asks for tracebacks.
    """
    if isinstance(error, Submitted):
        say(str(error))
        return 0
    if isinstance(error, Interrupted):
        return _print(str(error), STOPPED)
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return _print("stopped", STOPPED)
    if isinstance(error, click.ClickException):
        return _print(shorten(printable(_usage(error))))
    text = describe(error)
    if os.environ.get("HATRACK_TRACEBACK"):
        raise error
    if text is None:
        said = shorten(printable(f"{type(error).__name__}: {error}"), 300)
        return _print(f"an error that is not expected, {said}; please report it, with {_log(error, words)}", DEFECT)
    for line in text.split("\n"):  # several runs diverged
        _print(shorten(printable(line)))
    return MISTAKE


def describe(error: BaseException) -> str | None:
    """Return what an expected error says; None for any other."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, EXPECTED):
        return str(error) if str(error) or not isinstance(error, MemoryError) else "there is not enough memory"
    # torch has no type of error for this on a CPU, so its text must tell
    said = str(error) if isinstance(error, RuntimeError) else ""
    if allocation := re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", said):
        return f"there is not enough memory for another {allocation[1]}"
    return "there is not enough memory for tensors of this size" if TOO_LARGE.search(said) else None


def _log(error: BaseException, words: Sequence[str]) -> str:
    """Write a traceback to a new file that only the user can read; return what to say of it."""
    head = f"hatrack {__version__}, Python {python_version()}, {platform()}\n{shlex.join(['hatrack', *words])}\n\n"
    text = head + "".join(traceback.format_exception(error))
    try:
        handle, path = tempfile.mkstemp(prefix="hatrack-", suffix=".log")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as problem:
        return f"what HATRACK_TRACEBACK=1 shows (no log file can be written: {problem.strerror})"
    return f"the file {path}"


def _usage(error: click.ClickException) -> str:
    if isinstance(error, click.MissingParameter) and error.ctx is not None:
        return f"{error.format_message().rstrip('.')}; {error.ctx.command_path} --help tells what it may be"
    if not isinstance(error, click.NoSuchOption):
        return error.format_message()
    near = f"; did you mean {error.possibilities[0]}?" if error.possibilities else ""
    return f"No such option: {error.option_name}{near}"


def _print(text: str, code: int = MISTAKE) -> int:
    with suppress(OSError):  # the terminal may be gone
        say(f"hatrack: {text}", sys.stderr)
    return code
