"""`hatrack run ... --tuned`: options from the outcomes of searches, and what records tell of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hatrack.experiments.record import Record
from hatrack.experiments.run import folder_of
from hatrack.experiments.spec import Run
from hatrack.experiments.tuned import Tuned
from hatrack.experiments.tuning_protocols import PROTOCOLS
from hatrack.options import parameters
from hatrack.regime import Regime
from hatrack.reporting.tables import option_text


@dataclass(frozen=True)
class Taken:
    """What a method takes from the outcome of a search.

    Attributes:
        method_options: options of the method.
        regime: options of the regime.
        note: what records tell of the search; empty if nothing was taken.
        lines: what to say about it.
    """

    method_options: Mapping[str, Any] = field(default_factory=dict)
    regime: Mapping[str, Any] = field(default_factory=dict)
    note: Mapping[str, Any] = field(default_factory=dict)
    lines: Sequence[str] = ()


NOTHING = Taken()


def take_tuned(
    files: Sequence[Path], benchmark: str, own: Mapping[str, Mapping[str, Any]], regime: Mapping[str, Any]
) -> dict[str, Taken]:
    """Return what every method takes from the outcomes of searches; options that were given by hand win.

    Args:
        files: the outcomes.
        benchmark: the benchmark of the runs.
        own: the options that were given to every method.
        regime: the options of the regime that were given.

    Raises:
        ValueError: a file is no outcome of a search, is of another method, or must not be used for this benchmark.
    """
    found: dict[str, Taken] = {}
    for path in files:
        tuned = Tuned.load(path)
        method = tuned.search["method"]
        if method not in own:
            raise ValueError(f"{path} is for the method {method}, not for {', '.join(own)}")
        if method in found:
            raise ValueError(f"--tuned names two files for {method}")
        tuned.check_fits(path, benchmark)
        found[method] = _take(path, tuned, benchmark, own[method], regime)
    return found


def _take(path: Path, tuned: Tuned, benchmark: str, own: Mapping[str, Any], regime: Mapping[str, Any]) -> Taken:
    options = {name: value for name, value in tuned.method_options.items() if name not in own}
    rates = {name: value for name, value in tuned.regime.items() if name not in regime}
    taken, all_of_them = {**options, **rates}, {**tuned.method_options, **tuned.regime}
    method, kept = tuned.search["method"], sorted(all_of_them.keys() - taken.keys())
    won = (
        [f"{method}: --{', --'.join(name.replace('_', '-') for name in kept)} was given and not taken from {path}"]
        if kept
        else []
    )
    if not taken:
        return Taken(lines=won)
    defaults = parameters(Regime)
    note = tuned.note(benchmark, taken, {name: defaults[name].default for name in rates})
    values = ", ".join(f"{name}={option_text(value)}" for name, value in taken.items())
    said = [f"{method}: {values}, taken from {path} (protocol {note['protocol']}, {note['trials']} trials)", *won]
    said += [f"caution, {method}: {PROTOCOLS[note['protocol']].caution}"] if PROTOCOLS[note["protocol"]].caution else []
    return Taken(options, rates, note, said)


def write_notes(runs: Sequence[Run], out: Path, notes: Mapping[str, Mapping[str, Any]]) -> None:
    """Write into the records of tuned runs how they were tuned; runs that have no record yet are left out."""
    for spec in runs:
        note, folder = notes.get(spec.name), folder_of(spec, out)
        if note and folder.done:
            record = Record.load(folder.record)
            if record.tuned != note:
                record.tuned = dict(note)
                record.save(out)
