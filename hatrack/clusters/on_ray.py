"""Runs on a cluster of Ray: `run_on_ray` is `run_all` for `--on ray`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hatrack.clusters.engine import Failed
from hatrack.clusters.fleet import Fleet
from hatrack.clusters.plan import Plan
from hatrack.clusters.ray_cluster import connected
from hatrack.clusters.ray_engine import RayEngine
from hatrack.clusters.request import Request
from hatrack.clusters.shared_folder import warn_if_unsafe
from hatrack.clusters.status import write_page
from hatrack.experiments.progress import Display
from hatrack.experiments.record import Record
from hatrack.experiments.run import folder_of
from hatrack.experiments.signals import stop_by_signal
from hatrack.experiments.spec import Run
from hatrack.files.atomic import writable
from hatrack.methods.divergence import Diverged
from hatrack.training.checkpoint import Stopped


def run_on_ray(
    runs: Sequence[Run],
    out: Path,
    request: Request,
    *,
    notes: Mapping[str, Mapping[str, Any]] | None = None,
    again: bool = False,
    **how: Any,
) -> list[Record]:
    """Carry out runs on a cluster of Ray, a task for each, with progress on a terminal.

    A run that diverges or fails does not stop the others; it is an error when they have their records.

    Args:
        runs: what to run; a run that has its record in `out` is not run again.
        out: the folder of the records, on this machine.
        request: the cluster, and what every run asks of it.
        notes: how the options of runs were chosen, by their names.
        again: run even what has a record.
        how: engine, precision, save_every, keep_model, keep_each: see `run`.

    Returns:
        The records in the order of the runs.
    """
    todo = {spec.name: spec for spec in runs}
    models = how.get("keep_model") or how.get("keep_each")
    if not again and not models and all(folder_of(spec, out).done for spec in todo.values()):
        return [Record.load(folder_of(spec, out).record) for spec in runs]  # no cluster is needed
    writable(out)  # before a cluster is started
    shared = request.files == "folder"
    if shared:
        warn_if_unsafe(out)
    how |= {"device": request.device, "again": again}
    with (
        connected(request) as ray,
        stop_by_signal(),
        Plan(out, "ray", todo, write_page) as plan,
        Display(len(todo)) as display,
    ):
        engine = RayEngine(ray, request)
        plan.about["node"] = engine.node
        fleet = Fleet(
            todo, out.absolute() if shared else out, how, engine, display.show, plan,
            notes=notes, shared=shared, threads=max(1, int(request.cpus)), send=request.data == "send",
        )  # fmt: skip
        try:
            found = fleet.run()
        except Stopped:
            raise Stopped(_stopped(fleet, again)) from None
        except KeyboardInterrupt:
            raise Stopped("stopped at once; the same command goes on from what was saved before") from None
    outcomes = [found[spec.name] for spec in runs]
    return records_or_reasons(outcomes, out)


def _stopped(fleet: Fleet, again: bool) -> str:
    """Say in one line how to continue."""
    for name in fleet.todo if again else ():
        if name not in fleet.found:  # so that it is not taken for finished
            with folder_of(fleet.todo[name], fleet.out) as folder:
                folder.start_anew()
    done, command = len(fleet.found), "the same command" + " without --again" * again
    return f"stopped, and saved: {done} of {len(fleet.todo)} runs are finished, and {command} goes on with the others"


def records_or_reasons(outcomes: Sequence[Record | Diverged | Failed], out: Path) -> list[Record]:
    """Return the records; if runs have none, raise an error that tells why, each reason once."""
    records = [outcome for outcome in outcomes if isinstance(outcome, Record)]
    reasons = Counter(str(outcome) for outcome in outcomes if not isinstance(outcome, Record))
    if not reasons:
        return records
    lines = [f"{count} runs: {reason}" if count > 1 else reason for reason, count in reasons.items()]
    lines.append(f"{len(records)} of {len(outcomes)} runs have their records in {out}; hatrack status {out} tells more")
    if all(isinstance(outcome, Record | Diverged) for outcome in outcomes):
        raise Diverged("\n".join(lines))
    raise ValueError("\n".join(lines))
