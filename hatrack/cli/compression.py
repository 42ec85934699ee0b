"""Carrying out the runs of `hatrack compress`. Imported when it begins: it needs torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from hatrack.cli.compress import DEFAULTS
from hatrack.cli.errors import Interrupted
from hatrack.cli.execute import available, chosen_seeds
from hatrack.experiments.parallel import run_all
from hatrack.experiments.spec import Run
from hatrack.files.atomic import write
from hatrack.methods import METHODS
from hatrack.regime import Regime
from hatrack.reporting.compression import (
    QUOTED,
    Compression,
    compression_csv,
    compression_page,
    compression_table,
    draw,
    size,
)
from hatrack.text import printable, say
from hatrack.training.checkpoint import Stopped

SET = {"only_task": "--task", "first_tasks": "--task", "watch_tasks": "the command"}  # options of a run, and what sets them
NAME = "compress"  # of the files
SVG = "http://www.w3.org/2000/svg"


def compress(
    benchmark: str,
    task: str,
    method: str,
    *,
    given: Mapping[str, Mapping[str, Any]],
    network: str,
    seed: int | None,
    seeds: str | None,
    out: Path,
    device: str,
    **how: Any,
) -> None:
    """Train one task with gates that have a price and by plain SGD, print the table, and write a page, figures and a CSV.

    Args:
        benchmark: the name of the benchmark.
        task: the name of the task, or its number from 0.
        method: the method with gates.
        given: the options for which the user chose a value, by what they belong to.
        network: the name of the network; "" for the benchmark's own.
        seed: the only seed.
        seeds: several seeds, as a text.
        out: the folder of the records and results.
        device: "auto", "cpu" or "cuda".
        how: engine, precision, save_every, parallel, keep_model.
    """
    for name in SET.keys() & given["run"]:
        raise ValueError(f"--{name.replace('_', '-')} is set by {SET[name]}")
    if not task:
        raise ValueError("--task must be the name of a task or its number from 0, not ''")
    regime = Regime(**given["regime"])
    regime.check_effect(given["regime"], method, METHODS.find(method).replaces)
    options: dict[str, Any] = {key: given[key] for key in ("benchmark_options", "network_options")}
    options |= {**given["run"], "network": network, "regime": regime, "only_task": task, "watch_tasks": True}
    gates = {**DEFAULTS, **given["method_options"]}
    wanted = chosen_seeds(seed, seeds)
    runs = [Run(benchmark, method, s, method_options=gates, **options) for s in wanted]
    runs += [Run(benchmark, "sgd", s, **options) for s in wanted]
    try:
        records = run_all(runs, out, device=available(device), **how)
    except Stopped as error:
        raise Interrupted(str(error)) from error
    title = f"{records[0].tasks[0].name} of {benchmark}, {runs[0].network}"
    found = Compression(printable(title), records[: len(wanted)], records[len(wanted) :])
    Console().print(compression_table(found))
    for closed in (record.spec.seed for record in found.gated if not size(record)):
        say(f"seed {closed}: every gate was closed before the task was learned; a smaller --gate-lr or --c leaves some open")
    for line in QUOTED:
        say(line)
    drawing = draw(found)
    write(out / f"{NAME}.csv", compression_csv(found))
    write(out / f"{NAME}.png", drawing.png)
    write(out / f"{NAME}.svg", drawing.svg.replace("<svg ", f'<svg xmlns="{SVG}" ', 1))  # which a file needs, and a page not
    write(out / f"{NAME}.html", compression_page(found, drawing))
    say(f"{len(records)} records in {out}; the page: {out / f'{NAME}.html'}")
