"""Runs on Slurm by submitit: `run_on_slurm` is `run_all` for `--on slurm`."""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hatrack.clusters.engine import Failed
from hatrack.clusters.on_ray import records_or_reasons
from hatrack.clusters.plan import JOBS
from hatrack.clusters.request import Request, Submitted
from hatrack.clusters.shared_folder import warn_if_unsafe
from hatrack.clusters.slurm_job import SlurmJob
from hatrack.clusters.slurm_queue import live_runs, write_array
from hatrack.experiments.record import Record
from hatrack.experiments.run import folder_of
from hatrack.experiments.signals import stop_by_signal
from hatrack.experiments.spec import Run
from hatrack.files.atomic import writable
from hatrack.training.checkpoint import Stopped, stopping

MISSING = "--on slurm needs submitit, which is not installed: pip install 'hatrack[slurm]'"
LOOK = 2.0  # seconds between two looks at the queue


def run_on_slurm(
    runs: Sequence[Run],
    out: Path,
    request: Request,
    *,
    parallel: int = 1,
    notes: Mapping[str, Mapping[str, Any]] | None = None,
    again: bool = False,
    **how: Any,
) -> list[Record]:
    """Submit runs as an array of jobs; runs that are queued or running already are left alone.

    Args:
        runs: what to run; a run that has its record in `out` is not run again.
        out: the folder of the records, which all nodes have.
        request: what every job asks for.
        parallel: how many runs of a job at a time.
        notes: how the options of runs were chosen, by their names.
        again: run even what has a record.
        how: engine, precision, save_every, keep_model, keep_each: see `run_all`.

    Returns:
        The records in the order of the runs, if all are there or the request says to wait for them.

    Raises:
        Submitted: says how to see the results later.
    """
    out, todo = out.absolute(), {spec.name: spec for spec in runs}
    queued = live_runs(out)
    left = [spec for name, spec in todo.items() if name not in queued and (again or not folder_of(spec, out).done)]
    if left:
        warn_if_unsafe(out)
        _submit(left, out, request, {**how, "device": request.device, "parallel": parallel}, notes or {}, again)
    waiting = [spec for spec in todo.values() if not folder_of(spec, out).done]
    if waiting and request.wait == "no":
        said = f"{len(left)} runs were handed to Slurm" if left else f"{len(waiting)} runs are with Slurm already"
        raise Submitted(f"{said}; hatrack status {out} tells how far they are, and the same command shows the results")
    if waiting:
        _wait(out)
    return records_or_reasons([_outcome(spec, out) for spec in runs], out)


def _submit(
    left: Sequence[Run],
    out: Path,
    request: Request,
    how: Mapping[str, Any],
    notes: Mapping[str, Mapping[str, Any]],
    again: bool,
) -> None:
    """Submit one array for all runs, with so many runs per job as the request says."""
    try:
        import submitit
    except ImportError:
        raise ValueError(MISSING) from None
    for spec in left if again else ():
        with folder_of(spec, out) as folder:
            folder.start_anew()
    groups = [left[start : start + request.group] for start in range(0, len(left), request.group)]
    threads = max(1, int(request.cpus))
    jobs = [SlurmJob(g, out, how, {s.name: notes[s.name] for s in g if s.name in notes}, threads) for g in groups]
    logs = writable(out / JOBS / request.cluster)
    try:
        executor = submitit.AutoExecutor(logs, request.cluster, slurm_max_num_timeout=request.requeues)
        executor.update_parameters(**_parameters(request))
        with executor.batch():
            handles = [executor.submit(job) for job in jobs]
    except (RuntimeError, OSError, submitit.core.utils.FailedJobError) as error:
        raise ValueError(f"Slurm did not take the jobs: {' '.join(str(error).split())}") from None
    pids = [getattr(getattr(handle, "_process", None), "pid", 0) for handle in handles]
    names = [[spec.name for spec in group] for group in groups]
    write_array(out, request.cluster, [str(handle.job_id) for handle in handles], names, pids)


def _parameters(request: Request) -> dict[str, Any]:
    """Return what a job asks for, in submitit's words. --time has whole minutes."""
    common: dict[str, Any] = {"name": "hatrack", "cpus_per_task": max(1, round(request.cpus))}
    if request.gpus:
        common["gpus_per_node"] = math.ceil(request.gpus * request.group - 1e-9)
    if request.memory:
        common["mem_gb"] = request.memory
    if request.cluster == "local":
        return {**common, "timeout_min": max(1, round(request.time))}
    slurm: dict[str, Any] = {
        "slurm_signal_delay_s": request.signal,
        "slurm_array_parallelism": request.at_once,
        "slurm_additional_parameters": {"requeue": True},
    }
    slurm |= {"slurm_partition": request.partition} if request.partition else {}
    slurm |= {"slurm_account": request.account} if request.account else {}
    return {**common, **slurm, "timeout_min": max(1, round(request.time))}


def _wait(out: Path) -> None:
    """Wait until Slurm has none of the runs any more. Ctrl-C ends the waiting, not the jobs."""
    with stop_by_signal():
        while live_runs(out):
            if stopping.is_set():
                raise Stopped("stopped waiting; the jobs go on, and scancel ends them")
            time.sleep(LOOK)


def _outcome(spec: Run, out: Path) -> Record | Failed:
    folder = folder_of(spec, out)
    if folder.done:
        return Record.load(folder.record)
    logs = out / JOBS
    return Failed(
        folder.failure() or f"the job of {spec.name} ended without a record and without a reason; its log is in {logs}"
    )
