"""What is said when something goes wrong: one line on standard error, and the exit code."""

import os
import re
import sys

import click

from hatrack.methods.divergence import Diverged
from hatrack.text import printable, shorten

MISTAKE, STOPPED = 2, 130  # exit codes
EXPECTED = (ValueError, IndexError, OSError, MemoryError, Diverged)  # of a user's words, files and computer


class Interrupted(Exception):  # noqa: N818
    """The runs saved their states and stopped, because somebody asked for it."""


def report(error: BaseException) -> int:
    """Print what went wrong on standard error.

    Args:
        error: what was raised by a command.

    Returns:
        The exit code.

    Raises:
        The error itself, if it is a defect of ours, or if $HATRACK_TRACEBACK asks for tracebacks.
    """
    if isinstance(error, Interrupted):
        return _print(str(error), STOPPED)
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return _print("stopped", STOPPED)
    if isinstance(error, click.ClickException):
        return _print(shorten(printable(_usage(error))))
    text = describe(error)
    if text is None or os.environ.get("HATRACK_TRACEBACK"):
        raise error
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
    allocation = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error)) if isinstance(error, RuntimeError) else None
    return f"there is not enough memory for another {allocation[1]}" if allocation else None


def _usage(error: click.ClickException) -> str:
    if not isinstance(error, click.NoSuchOption):
        return error.format_message()
    near = f"; did you mean {error.possibilities[0]}?" if error.possibilities else ""
    return f"No such option: {error.option_name}{near}"


def _print(text: str, code: int = MISTAKE) -> int:
    print(f"hatrack: {text}", file=sys.stderr)
    return code
