"""Where the time of runs goes: python -m speed.shares FOLDER [FOLDER ...]

By benchmark and method in every folder of records: the steps per second of all its runs together, if they ran side by side
from beginning to end, and the shares of the time in percent. All but "steps" is what a run does besides. Records that were
made before these times were measured are left out.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hatrack import Record

PARTS = ("steps", "compiling", "validation", "evaluation", "data", "method", "saving", "other")


def groups(folder: Path) -> dict[str, list[Record]]:
    """Return the records with these times in a folder, by benchmark and method."""
    found: dict[str, list[Record]] = defaultdict(list)
    for path in sorted(folder.glob("*.json")):
        record = Record.load(path)
        if record.seconds.parts and record.seconds.total:
            found[f"{record.spec.benchmark} {record.spec.method}"].append(record)
    return found


def cells(records: Sequence[Record]) -> list[str]:
    """Return what the table says of the runs of a method: their number, steps per second, and shares of the time."""
    total = sum(record.seconds.total or 0.0 for record in records)
    steps = sum(record.costs.steps or 0 for record in records if record.costs)
    rate = steps / max(record.seconds.total or 0.0 for record in records)
    shares = [sum((record.seconds.parts or {}).get(part, 0.0) for record in records) / total for part in PARTS]
    return [str(len(records)), f"{rate:,.0f}", *(f"{100 * share:.1f}" for share in shares)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    table = Table("", "n", "steps/s", *(f"{part}, %" for part in PARTS))
    for folder in parser.parse_args().folders:
        for title, records in groups(folder).items():
            table.add_row(title, *cells(records))
    if not table.row_count:
        sys.exit("no record there tells where its time went")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
