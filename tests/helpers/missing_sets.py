"""The data sets that a benchmark lacks, by its error message."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from hatrack.datasets.catalog import SETS


def missing(sequence: Callable[[int], Any]) -> set[str]:
    """Return the data sets that the error of this benchmark names."""
    with pytest.raises(FileNotFoundError) as error:
        sequence(0)
    assert "\n" not in str(error.value)
    return {name for name in SETS if re.search(rf"(?<![\w-]){name}(?![\w-])", str(error.value))}
