"""`python -m hatrack` and the program `hatrack`: the command line."""

import gc
import sys
from collections.abc import Sequence

from hatrack.cli.interrupts import end_at_ctrl_c


def main(words: Sequence[str] | None = None) -> int:
    """Run the program. In a process of its own Ctrl-C ends it in one line from here on, also while modules are imported.

    Args:
        words: the command line without the name of the program; by default that of the process.

    Returns:
        The exit code: see `hatrack.cli.group.main`.
    """
    if words is None:
        end_at_ctrl_c()
    from hatrack.cli.group import main as run  # not above: it takes most of the time in which nothing handles Ctrl-C

    code = run(words)
    if words is None:
        gc.freeze()  # the process ends: to look for garbage among all objects of torch would take a second
    return code


if __name__ == "__main__":
    sys.exit(main())
