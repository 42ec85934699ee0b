"""Carrying out the runs of `hatrack run`, `resume` and `demo`. Imported when one of them begins: it needs torch."""

import os
import shlex
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hatrack.cli.errors import Interrupted
from hatrack.cli.group import imported_when_called
from hatrack.cli.take_tuned import NOTHING, kept_notes, take_tuned
from hatrack.cli.values import parse_seeds
from hatrack.clusters.dispatch import run_anywhere
from hatrack.clusters.shard import parse_shard
from hatrack.experiments import demo as demonstration
from hatrack.experiments.costs import expected_cost
from hatrack.experiments.record import Record
from hatrack.experiments.run import folder_of, stopped_runs
from hatrack.experiments.spec import Run
from hatrack.methods import METHODS
from hatrack.options import parameters
from hatrack.regime import Regime
from hatrack.reporting.endings import endings
from hatrack.reporting.tables import settings, terminal
from hatrack.text import duration, say
from hatrack.training.checkpoint import Stopped

REFERENCES = ("joint", "random", "independent")  # what a table needs to tell how good a method could be, or how bad
report = imported_when_called("hatrack.reporting.report:report")  # it needs matplotlib
watched = imported_when_called("hatrack.cli.watching:watched")


def run(
    benchmark: str,
    method: str,
    *,
    given: Mapping[str, Mapping[str, Any]],
    network: str,
    seed: int | None,
    seeds: str | None,
    out: Path,
    again: bool,
    with_references: bool,
    tuned: Sequence[Path],
    dry_run: bool,
    **how: Any,
) -> None:
    """Carry out the runs of one or several methods on a benchmark, one per method and seed.

    Args:
        benchmark: the name of the benchmark.
        method: the names of the methods with commas between them; one of the user's own is "module:class".
        given: the options for which the user chose a value: of the regime, of the run itself, of benchmark, network, method.
        network: the name of the network; "" for the benchmark's own.
        seed: the only seed.
        seeds: several seeds, as a text.
        out: the folder of the records.
        again: run even what has a record.
        with_references: run the references of the forgetting ratio and of single tasks as well.
        tuned: outcomes of searches, from which methods take options that were not given.
        dry_run: run nothing, and print what would run and what it would cost.
        how: device, engine, precision, save_every, parallel, log, watch, and where to run: on, ask, shard, ranks.
    """
    wanted = chosen_seeds(seed, seeds)
    names = method.split(",")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{twice[0]} is named twice")
    regime = Regime(**given["regime"])
    own = own_options(names, given["method_options"])
    found = take_tuned(tuned, benchmark, own, given, network, wanted)
    regimes = {name: replace(regime, **found.get(name, NOTHING).regime) for name in names}
    for name, mine in regimes.items():  # what was taken may leave an option that was given without effect
        mine.check_effect(given["regime"], name, METHODS.find(name).replaces)
    options: dict[str, Any] = {key: given[key] for key in ("benchmark_options", "network_options")}
    options |= given["run"]
    scenario = options.get("scenario", "task")
    if scenario != "task" and options.get("heads") == "multi":
        raise ValueError(f"--heads multi does nothing with --scenario {scenario}, in which all tasks have one head")
    references = [name for name in REFERENCES if scenario in METHODS.about(name).scenarios]
    names += [name for name in references if with_references and name not in names]
    runs, notes = [], {}
    for name in names:
        taken = found.get(name, NOTHING)
        for s in wanted:
            spec = Run(
                benchmark, name, s, network=network, regime=regimes.get(name, regime),
                method_options={**taken.method_options, **own.get(name, {})}, **options,
            )  # fmt: skip
            runs.append(spec)
            if taken.note:
                notes[spec.name] = taken.note
    for line in (line for taken in found.values() for line in taken.lines):
        say(line)
    warn_of_random_trunk(runs[0])
    if dry_run:
        show_costs(runs, out, again)
    else:
        carry_out(runs, out, again, notes=notes, **how)


def warn_of_random_trunk(spec: Run) -> None:
    """Warn if no task changes the trunk of a run, although nothing has trained it."""
    if spec.trunk == "frozen" and not (spec.weights or spec.pretrain):
        given = f"--adapters {spec.adapters}" if spec.adapters else "--trunk frozen"
        said = f"{given} keeps the trunk at its random weights: --weights FILE or --pretrain SET gives it trained ones"
        warnings.warn(said, stacklevel=2)


def own_options(names: Sequence[str], given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the options that were given to each of several methods; raise an error if two of them have the same one."""
    own: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key, value in given.items():
        owners = [name for name in names if key in parameters(METHODS.find(name))]
        if len(owners) > 1:
            flag = key.replace("_", "-")
            raise ValueError(
                f"--{flag} is an option of {owners[0]} and of {owners[1]}, not the same one; run them one by one"
            )
        own[owners[0]][key] = value
    return own


def chosen_seeds(seed: int | None, seeds: str | None) -> list[int]:
    """Return the seeds that the two options stand for."""
    if seed is not None and seeds is not None:
        raise ValueError("--seed and --seeds exclude each other")
    return parse_seeds(seeds) if seeds is not None else [seed or 0]


def show_costs(runs: Sequence[Run], out: Path, again: bool, names: Sequence[str] = ()) -> None:
    """Print what would run and what it would cost, by the times in the records of the folder.

    Args:
        runs: what would run.
        out: the folder of the records.
        again: whether runs that have a record would run again.
        names: what distinguishes each run; by default its method.
    """
    records = [Record.load(path) for path in sorted(out.glob("*.json"))] if out.is_dir() else []
    table = Table("run", "seed", "time", "by the times of", box=box.SIMPLE, padding=(0, 1, 0, 0))
    total, unknown, there = 0.0, 0, 0
    for spec, name in zip(runs, names or [spec.method for spec in runs], strict=True):
        if not again and folder_of(spec, out).done:
            there += 1
            continue
        seconds, similar = expected_cost(spec, records)
        total, unknown = total + (seconds or 0.0), unknown + (seconds is None)
        text = "unknown" if seconds is None else duration(seconds)
        table.add_row(Text(f"{spec.benchmark} {name}"), str(spec.seed), text, similar)
    Console().print(table)
    count = len(runs) - there
    known = [f"{duration(total)} one after the other"] if count > unknown else []
    costs = [*known, f"{unknown} of unknown cost"] if unknown else known
    say(f"{count} to run{': ' if costs else ''}{', '.join(costs)}; {there} have a record in {out}")


def resume(folder: Path, methods: Sequence[str], **how: Any) -> None:
    """Continue the runs in a folder that were stopped.

    Args:
        folder: a folder of records, or the folder NAME.part of one run.
        methods: methods of the user's own, "module:class", that may be imported.
        how: device, engine, precision, save_every, parallel, log, watch.
    """
    for name in methods:
        METHODS.find(name)  # an error now if there is none
    runs, others = stopped_runs(folder, methods)
    if not runs:
        if others:
            raise ValueError("; ".join(others))
        say(f"nothing in {folder} was stopped before its end")
        return
    for why in others:
        warnings.warn(why, stacklevel=2)
    carry_out(runs, folder.parent if folder.suffix == ".part" else folder, **how)


def demo(out: Path) -> None:
    """Carry out the runs of the demonstration and make their page."""
    carry_out(demonstration.runs(), out, device="cpu", engine="eager", parallel=min(2, os.cpu_count() or 1), page=True)


def carry_out(
    runs: Sequence[Run],
    out: Path,
    again: bool = False,
    *,
    device: str,
    notes: Mapping[str, Mapping[str, Any]] | None = None,
    watch: bool = False,
    page: bool = False,
    **how: Any,
) -> None:
    """Carry out runs, then print the table of their results and what to doubt.

    Args:
        runs: the runs.
        out: the folder of the records.
        again: run even what has a record.
        device: "auto", "cpu" or "cuda".
        notes: how runs were tuned, by name.
        watch: show the runs in the browser, and leave the page as a file.
        page: leave the page as a file.
        how: engine, precision, save_every, parallel, log: see `run_all`.
    """
    mine = parse_shard(how["shard"]).part_of(runs) if how.get("shard") else runs
    there = set() if again else {spec.name for spec in mine if folder_of(spec, out).done}
    try:
        with watched(out) if watch else nullcontext():
            records = run_anywhere(runs, out, again=again, notes=notes, device=chosen_device(device, how), **how)
    except Stopped as error:
        raise Interrupted(str(error)) from error
    for setting in settings(records):
        Console().print(terminal(setting))
        for line in endings(setting):
            say(line)
    count, quoted = f"{len(records)} {'record' if len(records) == 1 else 'records'}", shlex.quote(str(out))
    shown = f"the page: {report(out)}" if watch or page else f"hatrack report {quoted} makes the page {out / 'report.html'}"
    say(f"{count} in {out}; {shown}")
    if there:
        say(f"{len(there)} of them {'was' if len(there) == 1 else 'were'} there already and not run again; --again does")
    for line in kept_notes([record for record in records if record.name in there], notes or {}):
        say(line)


def chosen_device(device: str, how: Mapping[str, Any]) -> str:
    """Return the type of the device; on a cluster, which has other devices than this machine, the name as it was given."""
    return device if how.get("on") else available(device)


def available(device: str) -> str:
    """Return the type of the device: "cpu" or "cuda" for "auto"; raise an error if there is no GPU for "cuda"."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: no GPU that torch can use was found; --device cpu works everywhere")
    return device
