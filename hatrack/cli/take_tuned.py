"""`hatrack run ... --tuned`: options from the outcomes of searches, and what records tell of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hatrack.benchmarks import BENCHMARKS
from hatrack.experiments.record import Record, clean
from hatrack.experiments.spec import Run
from hatrack.experiments.tuned import Tuned
from hatrack.experiments.tuning_protocols import caution_of
from hatrack.methods import METHODS
from hatrack.networks import NETWORKS
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
MEASURED = ("train_examples", "watch_tasks", "router")  # options of a run that change what is measured, not what is learned


def take_tuned(
    files: Sequence[Path],
    benchmark: str,
    own: Mapping[str, Mapping[str, Any]],
    given: Mapping[str, Mapping[str, Any]],
    network: str,
    seeds: Sequence[int],
) -> dict[str, Taken]:
    """Return what every method takes from the outcomes of searches; options that were given by hand win.

    Args:
        files: the outcomes.
        benchmark: the benchmark of the runs.
        own: the options that were given to every method.
        given: all options that were given, by what they belong to.
        network: the network of the runs; "" for the benchmark's own.
        seeds: the seeds of the runs.

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
        mine = {**given, "method_options": own[method]}
        found[method] = _take(path, tuned, benchmark, mine, seeds)
        if found[method].note and (other := differences(tuned, benchmark, mine, network)):
            line = f"warning, {method}: this run differs from the search in {path}: {'; '.join(other)}"
            found[method] = replace(found[method], lines=[*found[method].lines, line])
    return found


def _take(path: Path, tuned: Tuned, benchmark: str, given: Mapping[str, Mapping[str, Any]], seeds: Sequence[int]) -> Taken:
    options = {name: value for name, value in tuned.method_options.items() if name not in given["method_options"]}
    rates = {name: value for name, value in tuned.regime.items() if name not in given["regime"]}
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
    for caution in dict.fromkeys(found for seed in seeds if (found := caution_of(note, seed))):
        at = ",".join(str(seed) for seed in seeds if caution_of(note, seed) == caution)
        said.append(f"caution, {method} at seed {at}: {caution.text}")
    return Taken(options, rates, note, said)


def differences(tuned: Tuned, benchmark: str, given: Mapping[str, Mapping[str, Any]], network: str) -> list[str]:
    """Return in which options a run differs from the trials of a search, apart from the options that were searched.

    The options of two different benchmarks or networks are not compared.

    Args:
        tuned: the outcome of the search.
        benchmark: the benchmark of the run.
        given: the options that were given to the run, by what they belong to.
        network: the network of the run; "" for the benchmark's own.
    """
    search = tuned.search
    there, here = search["on"] or search["benchmark"], benchmark
    networks = [chosen or BENCHMARKS.about(name).network for chosen, name in ((search["network"], there), (network, here))]
    tables: dict[str, Any] = {"run": Run, "regime": Regime, "method_options": METHODS.find(search["method"])}
    tables |= {"benchmark_options": BENCHMARKS.find(here)} if there == here else {}
    tables |= {"network_options": NETWORKS.find(networks[1])} if networks[0] == networks[1] else {}
    found = [] if networks[0] == networks[1] else [f"network {networks[1]}, there {networks[0]}"]
    for key, owner in tables.items():
        for name, parameter in parameters(owner).items():
            if name not in search["space"] and name not in MEASURED:
                one, two = (clean(table.get(key, {}).get(name, parameter.default)) for table in (search["given"], given))
                found += [f"{name} {option_text(two)}, there {option_text(one)}"] if one != two else []
    return found


def kept_notes(records: Sequence[Record], notes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for the records that were there before and tell another choice of their options than this command.

    Args:
        records: the records that were there before.
        notes: what new records of the same runs would tell, by name.
    """
    groups: dict[str, list[str]] = {}
    for record in records:
        if record.tuned != notes.get(record.name, record.tuned):
            how = "were not taken from a search"
            if record.tuned:
                how = f"were chosen by the protocol {record.tuned.get('protocol')}, {record.tuned.get('trials')} trials"
            groups.setdefault(how, []).append(f"{record.spec.method} seed {record.spec.seed}")
    return [f"{', '.join(names)}: there already; the options {how}, which the record keeps" for how, names in groups.items()]
