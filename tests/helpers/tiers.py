"""The tiers of tests: which cases belong to `make test`, and which to `make test-slow` and `make test-long`."""

import os
from collections.abc import Iterable
from typing import Any

import pytest

QUICK = ("sgd", "hat", "ewc")  # one method of each kind: plain, isolated, with a penalty


def quick_and_slow(names: Iterable[Any], quick: Iterable[Any] = QUICK) -> list[Any]:
    """Parameters of a test, all but the quick ones marked as slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def cases(few: int, all_of_them: int) -> int:
    """Return how many random cases to try: few, or all of them with `make test-long`."""
    return all_of_them if os.environ.get("HATRACK_TEST_LONG") else few
