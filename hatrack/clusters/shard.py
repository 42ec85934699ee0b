"""The part of a command's runs that one process carries out: `--shard 2/8` is the second of eight parts."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from hatrack.experiments.spec import Run


class Shard(NamedTuple):
    """One of several parts of a command's runs.

    Attributes:
        number: which part, from 1.
        parts: how many parts there are.
    """

    number: int
    parts: int

    def __str__(self) -> str:
        return f"{self.number}/{self.parts}"

    def part_of(self, runs: Sequence[Run]) -> list[Run]:
        """Return the runs of this part, in the order of `runs`.

        The names are sorted and dealt out like cards. So the parts depend on the names alone, not on the order of the runs
        or on what has a record; every run is in exactly one part, and their sizes differ by one at most.

        Args:
            runs: all runs of the command.
        """
        names = sorted({run.name for run in runs})
        own = set(names[self.number - 1 :: self.parts])
        return [run for run in runs if run.name in own]


def parse_shard(text: str) -> Shard:
    """Return the shard that a text such as "2/8" stands for."""
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip())
    shard = Shard(int(found[1]), int(found[2])) if found else None
    if shard is None or not 1 <= shard.number <= shard.parts:
        raise ValueError(f"--shard must be a part and their number, from 1/8 to 8/8 for eight processes, not {text!r}")
    return shard
