"""Carrying out the runs of a command: in this process, on Ray, on Slurm, or one part of them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hatrack.clusters.on_ray import run_on_ray
from hatrack.clusters.on_slurm import run_on_slurm
from hatrack.clusters.ranks import run_on_ranks
from hatrack.clusters.ray_cluster import connected
from hatrack.clusters.request import Request, parse_request
from hatrack.clusters.shard import parse_shard
from hatrack.clusters.shared_folder import warn_if_unsafe
from hatrack.experiments.parallel import run_all
from hatrack.experiments.record import Record
from hatrack.experiments.spec import Run


@contextmanager
def hold_cluster(request: Request) -> Iterator[None]:
    """Within it several calls of `run_anywhere` use one cluster of Ray, if that is the engine."""
    if request.engine != "ray":
        yield
        return
    with connected(request):
        yield


def run_anywhere(
    runs: Sequence[Run],
    out: Path,
    *,
    device: str,
    parallel: int = 1,
    on: str = "",
    ask: str = "",
    shard: str = "",
    ranks: int = 1,
    notes: Mapping[str, Mapping[str, Any]] | None = None,
    **how: Any,
) -> list[Record]:
    """Carry out runs where the options say.

    Args:
        runs: what to run; a run that has its record in `out` is not run again.
        out: the folder of the records.
        device: "cpu" or "cuda"; with an engine also "auto": a GPU if the runs ask for one.
        parallel: how many runs at a time, in this process or in a job of Slurm.
        on: "ray", "ray:ADDRESS", "slurm", or "" for this process.
        ask: what every run asks of the engine, as `parse_request` reads it.
        shard: "2/8" for the second of eight parts; "" for all runs.
        ranks: how many processes share the batches of every run.
        notes: how the options of runs were chosen, by their names.
        how: again, engine, precision, save_every, keep_model, keep_each: see `run_all`.

    Returns:
        The records in the order of the runs; of a shard, those of its runs.
    """
    request = parse_request(on, ask, device)
    for name in ("log", "stack") if on or ranks > 1 else ():
        if how.pop(name, None):
            raise ValueError(f"--{name} is for runs of this process: without --on and --ranks")
    if shard:
        runs = parse_shard(shard).part_of(runs)
        warn_if_unsafe(out)
        if not runs:
            return []
    if ranks > 1:
        if on or parallel > 1:
            raise ValueError(
                f"--ranks {ranks} goes with one run after the other on this machine, without --on and --parallel"
            )
        return run_on_ranks(runs, out, ranks, device=device, notes=notes, **how)
    if request.engine == "ray":
        if parallel > 1:
            raise ValueError(
                "--parallel is for one machine: Ray runs as many at a time as --ask cpus= and gpus= leave room for"
            )
        return run_on_ray(runs, out, request, notes=notes, **how)
    if request.engine == "slurm":
        return run_on_slurm(runs, out, request, parallel=parallel, notes=notes, **how)
    return run_all(runs, out, device=device, parallel=parallel, notes=notes, **how)
