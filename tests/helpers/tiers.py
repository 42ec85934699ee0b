"""The tiers of tests: which cases belong to `make test`, and which to `make test-slow` and `make test-long`."""

import itertools
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


def every_value(*values: Iterable[Any]) -> list[Any]:
    """The product of the values of several parameters, of which the quick combinations have every value at least once."""
    lists = [list(one) for one in values]
    quick = {tuple(k % len(one) for one in lists) for k in range(max(map(len, lists)))}
    return [
        pytest.param(
            *(one[k] for one, k in zip(lists, places, strict=True)), marks=() if places in quick else pytest.mark.slow
        )
        for places in itertools.product(*(range(len(one)) for one in lists))
    ]
