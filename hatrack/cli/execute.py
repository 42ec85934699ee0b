"""Carrying out the runs of `hatrack run`, `resume` and `demo`. Imported when one of them begins: it needs torch."""

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from hatrack.cli.errors import Interrupted
from hatrack.cli.values import parse_seeds
from hatrack.experiments import demo as demonstration
from hatrack.experiments.parallel import run_all
from hatrack.experiments.run import folder_of, stopped_runs
from hatrack.experiments.spec import Run
from hatrack.methods import METHODS
from hatrack.regime import Regime
from hatrack.reporting.report import report
from hatrack.reporting.tables import settings, terminal
from hatrack.text import say
from hatrack.training.checkpoint import Stopped


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
    **how: Any,
) -> None:
    """Carry out the runs of a method on a benchmark, one per seed.

    Args:
        benchmark: the name of the benchmark.
        method: the name of the method, or "module:class".
        given: the options for which the user chose a value: of the regime, of the run itself, of benchmark, network, method.
        network: the name of the network; "" for the benchmark's own.
        seed: the only seed.
        seeds: several seeds, as a text.
        out: the folder of the records.
        again: run even what has a record.
        how: device, engine, precision, save_every, parallel.
    """
    if seed is not None and seeds is not None:
        raise ValueError("--seed and --seeds exclude each other")
    wanted = parse_seeds(seeds) if seeds is not None else [seed or 0]
    regime = Regime(**given["regime"])
    regime.check_effect(given["regime"], method, METHODS.find(method).replaces)
    options: dict[str, Any] = {key: given[key] for key in ("method_options", "benchmark_options", "network_options")}
    options |= given["run"]
    carry_out([Run(benchmark, method, s, network=network, regime=regime, **options) for s in wanted], out, again, **how)


def resume(folder: Path, methods: Sequence[str], **how: Any) -> None:
    """Continue the runs in a folder that were stopped.

    Args:
        folder: a folder of records, or the folder NAME.part of one run.
        methods: methods of the user's own, "module:class", that may be imported.
        how: device, engine, precision, save_every, parallel.
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
    carry_out(demonstration.runs(), out, device="cpu", engine="eager", parallel=min(2, os.cpu_count() or 1))
    say(f"The page to look at: {report(out)}")


def carry_out(runs: Sequence[Run], out: Path, again: bool = False, *, device: str, **how: Any) -> None:
    """Carry out runs, then print the table of their results."""
    there = 0 if again else sum(folder_of(spec, out).done for spec in runs)
    try:
        records = run_all(runs, out, again=again, device=available(device), **how)
    except Stopped as error:
        raise Interrupted(str(error)) from error
    for setting in settings(records):
        Console().print(terminal(setting))
    for record in records:
        for said in filter(None, (record.capacity, record.held, record.halvings)):
            say(f"{record.spec.method} seed {record.spec.seed}: {said}")
    say(f"{len(records)} {'record' if len(records) == 1 else 'records'} in {out}; a page of them: hatrack report {out}")
    if there:
        say(f"{there} of them {'was' if there == 1 else 'were'} there already and not run again; --again does")


def available(device: str) -> str:
    """Return the type of the device: "cpu" or "cuda" for "auto"; raise an error if there is no GPU for "cuda"."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: no GPU that torch can use was found; --device cpu works everywhere")
    return device
