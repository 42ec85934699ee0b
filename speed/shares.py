"""Where the time of runs goes: python -m speed.shares FOLDER [FOLDER ...]

By method and setting in every folder of records: the steps per second of a run in the mean, and of all runs together, which
is right if they ran side by side from beginning to end; and the shares of the time in percent. All but "steps" is what a run
does besides. Records without these times are left out.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from hatrack import Record

PARTS = ("steps", "first steps", "validation", "evaluation", "data", "method", "saving", "other")


def groups(folder: Path) -> list[list[Record]]:
    """Return the records with these times in a folder, those of one setting and engine together."""
    found: dict[str, list[Record]] = defaultdict(list)
    for path in sorted(folder.glob("*.json")):
        record = Record.load(path)
        if record.seconds.parts and record.seconds.total:
            found[f"{replace(record.spec, seed=0, written={})} {record.versions.get('engine')}"].append(record)
    return list(found.values())


def cells(records: Sequence[Record]) -> list[str]:
    """Return what the table says of runs of one setting: what they are, steps per second, and shares of the time."""
    spec, totals = records[0].spec, [record.seconds.total or 0.0 for record in records]
    steps = [(record.costs.steps or 0) if record.costs else 0 for record in records]
    each = fmean(count / total for count, total in zip(steps, totals, strict=True))
    shares = [sum((record.seconds.parts or {}).get(part, 0.0) for record in records) / sum(totals) for part in PARTS]
    what = f"{spec.benchmark} {spec.method}, {spec.network}, {records[0].versions.get('engine')}"
    rates = f"{each:,.0f}", f"{sum(steps) / max(totals):,.0f}"
    return [what, str(len(records)), *rates, *(f"{100 * share:.1f}" for share in shares)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    table = Table("", "n", "steps/s", "together", *(f"{part}, %" for part in PARTS))
    for folder in parser.parse_args().folders:
        for records in groups(folder):
            table.add_row(*cells(records))
    if not table.row_count:
        sys.exit("no record there tells where its time went")
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
