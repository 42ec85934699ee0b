"""Checks of the arguments of a network."""

from typing import Any

from torch import nn

from hatrack.options import LARGEST_WHOLE, expect


def check_arguments(trunk: Any, freeze: Any, seed: Any, init: Any) -> None:
    """Raise a ValueError for the first argument of a network that is of a wrong kind."""
    expect("the trunk", trunk, nn.Module, "a module such as nn.Sequential(...)")
    expect("freeze", freeze, str, "patterns of names, separated by commas")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed must be a whole number, not {seed!r}")
    expect("init", init, str, "a text")


def check_classes(classes: int) -> None:
    """Raise a ValueError unless a task may have so many classes."""
    if not 1 <= classes <= LARGEST_WHOLE:
        raise ValueError(f"a task has at least one class and at most {LARGEST_WHOLE}, not {classes}")
