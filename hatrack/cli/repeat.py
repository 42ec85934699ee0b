"""`hatrack run --from RECORD.json`: repeat a run, and say whether its results are the same."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from hatrack.cli.errors import Interrupted
from hatrack.cli.execute import available
from hatrack.experiments.parallel import run_all
from hatrack.experiments.record import Record
from hatrack.experiments.sameness import differences
from hatrack.experiments.spec import Run
from hatrack.text import say
from hatrack.training.checkpoint import Stopped

DIFFERENT = 1  # the exit code


def repeat(record: Path, methods: Sequence[str], *, device: str, **how: Any) -> None:
    """Repeat the run of a record and compare the results; nothing is written.

    Args:
        record: the file of the record.
        methods: methods of the user's own, "module:class", that may be imported.
        device: "auto", "cpu" or "cuda".
        how: engine, precision, save_every, parallel: see `run_all`.
    """
    old = Record.load(record)
    spec = Run.from_spec(old.spec.written, methods)
    if spec.name != old.name:
        raise ValueError(f"{record} can't be repeated: this version, or the present data, would make another run of it")
    with tempfile.TemporaryDirectory() as folder:
        try:
            (new,) = run_all([spec], Path(folder), device=available(device), **how)
        except Stopped:
            raise Interrupted("stopped; nothing of the repeated run was kept") from None
    names = sorted(old.versions.keys() | new.versions.keys())
    changed = [
        f"{name} {old.versions.get(name, '?')} -> {new.versions.get(name, '?')}"
        for name in names
        if old.versions.get(name) != new.versions.get(name)
    ]
    lines = differences(old, new)
    for line in lines or ["all results are the same, bit for bit"]:
        say(line)
    if changed:
        say(f"versions differ: {', '.join(changed)}")
    if lines:
        raise click.exceptions.Exit(DIFFERENT)
