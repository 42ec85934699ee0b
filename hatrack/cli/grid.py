"""Carrying out the runs of `hatrack sweep`. Imported when it begins: it needs torch."""

from collections.abc import Mapping
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from hatrack.cli.errors import Interrupted
from hatrack.cli.execute import chosen_device, chosen_seeds, show_costs, watched
from hatrack.clusters.dispatch import run_anywhere
from hatrack.experiments.record import Record
from hatrack.experiments.run import folder_of
from hatrack.experiments.spec import Run
from hatrack.files.atomic import write
from hatrack.methods import METHODS
from hatrack.methods.divergence import Diverged
from hatrack.regime import Regime
from hatrack.reporting.response import Response, draw_response, response_csv, response_table
from hatrack.reporting.tables import option_text
from hatrack.text import say
from hatrack.training.checkpoint import Stopped


def sweep(
    benchmark: str,
    method: str,
    *,
    given: Mapping[str, Mapping[str, Any]],
    network: str,
    seed: int | None,
    seeds: str | None,
    out: Path,
    dry_run: bool,
    device: str,
    watch: bool = False,
    **how: Any,
) -> None:
    """Carry out the runs of a grid, print their table, and write sweep.png and sweep.csv.

    Args:
        benchmark: the name of the benchmark.
        method: the name of the method.
        given: the options for which the user chose values, each with a tuple of them, by what they belong to.
        network: the name of the network; "" for the benchmark's own.
        seed: the only seed.
        seeds: several seeds, as a text.
        out: the folder of the records and pictures.
        dry_run: run nothing, and print what would run and what it would cost.
        device: "auto", "cpu" or "cuda".
        watch: show the runs in the browser.
        how: engine, precision, save_every, parallel, log.
    """
    if "," in method:
        raise ValueError("a sweep varies the options of one method; hatrack run compares several")
    options = {(kind, name): values for kind, table in given.items() for name, values in table.items()}
    axes = {key: values for key, values in options.items() if len(values) > 1}
    if not axes:
        raise ValueError(
            "a sweep needs an option with several values, such as --lr 0.01,0.05; hatrack run takes single ones"
        )
    points = {}
    for chosen in product(*axes.values()):
        values = {key: value[0] for key, value in options.items()} | dict(zip(axes, chosen, strict=True))
        tables = {kind: {name: v for (of, name), v in values.items() if of == kind} for kind in given}
        regime = Regime(**tables.pop("regime", {}))
        regime.check_effect(given.get("regime", {}), method, METHODS.find(method).replaces)
        rest = tables.pop("run", {}) | tables
        points[tuple(map(option_text, chosen))] = [
            Run(benchmark, method, s, network=network, regime=regime, **rest) for s in chosen_seeds(seed, seeds)
        ]
    runs = [run for group in points.values() for run in group]
    if dry_run:
        labels = [f"{method} {', '.join(point)}" for point, group in points.items() for _ in group]
        show_costs(runs, out, again=False, names=labels)
        return
    failure = None
    try:
        with watched(out) if watch else nullcontext():
            run_anywhere(runs, out, device=chosen_device(device, how), **how)
    except Stopped as error:
        raise Interrupted(str(error)) from error
    except Diverged as error:  # the others have their records
        failure = error
    records = {run.name: Record.load(folder_of(run, out).record) for run in runs if folder_of(run, out).done}
    names = {name.replace("_", "-"): [option_text(v) for v in values] for (_, name), values in axes.items()}
    found = {point: [records[run.name] for run in group if run.name in records] for point, group in points.items()}
    response = Response(f"{method} on {benchmark}", names, found)
    Console().print(response_table(response))
    write(out / "sweep.csv", response_csv(response))
    write(out / "sweep.png", draw_response(response))
    say(f"{len(records)} records in {out}; the picture: {out / 'sweep.png'}")
    if failure:
        raise failure
