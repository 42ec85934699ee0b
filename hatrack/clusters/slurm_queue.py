"""Which runs Slurm has: arrays of jobs that were submitted from a folder, and what `squeue` says of them."""

import json
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from hatrack.clusters.plan import JOBS
from hatrack.files.atomic import read_bytes, writable, write

SUFFIX = ".array"
ENDED = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")
QUEUED = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "SUSPENDED", "RESV_DEL_HOLD", "REQUEUE_FED")


class QueuedJob(NamedTuple):
    """A job that Slurm still has.

    Attributes:
        job: its number, such as 12_3.
        state: "queued" or "running".
        why: what Slurm says of it, such as Resources.
    """

    job: str
    state: str
    why: str


def write_array(out: Path, cluster: str, jobs: list[str], names: list[list[str]], pids: list[int]) -> None:
    """Note which runs an array has.

    Args:
        out: the folder of the records.
        cluster: "slurm" or "local".
        jobs: the numbers of its jobs.
        names: the runs of each job.
        pids: the processes that stand for jobs, where there is no Slurm.
    """
    about = {"cluster": cluster, "jobs": jobs, "names": names, "pids": pids, "submitted": time.time()}
    write(writable(out / JOBS) / f"{cluster}-{jobs[0]}{SUFFIX}", json.dumps(about), follow=False)


def read_arrays(out: Path) -> list[dict[str, Any]]:
    """Return the arrays that were submitted from a folder, the oldest first."""
    found = []
    for path in (out / JOBS).glob(f"*{SUFFIX}"):
        with suppress(ValueError, RecursionError):
            about = json.loads(read_bytes(path, most=None))
            if isinstance(about, dict) and isinstance(about.get("jobs"), list) and isinstance(about.get("names"), list):
                found.append(about)
    return sorted(found, key=lambda about: float(about.get("submitted") or 0))


def live_runs(out: Path) -> dict[str, QueuedJob]:
    """Return the runs of a folder that Slurm has queued or is running, by name."""
    arrays = read_arrays(out)
    queue = _queue([job for about in arrays if about["cluster"] == "slurm" for job in about["jobs"]])
    found = {}
    for about in arrays:
        local = about["cluster"] != "slurm"
        for job, names, pid in zip(about["jobs"], about["names"], about["pids"], strict=False):
            live = QueuedJob(job, "running", "") if local and _lives(pid) else queue.get(job)
            if live:
                found.update(dict.fromkeys(names, live))
    return found


def _queue(jobs: list[str]) -> dict[str, QueuedJob]:
    """Return what Slurm says of jobs, by their numbers; those that it does not have are left out."""
    if not jobs:
        return {}
    arrays = sorted({job.partition("_")[0] for job in jobs})
    command = ["squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%r", "--jobs", ",".join(arrays)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"squeue can't be asked which jobs there are: {error}") from None
    if done.returncode and "Invalid job id" not in done.stderr:  # Slurm has forgotten jobs that ended long ago
        raise ValueError(f"squeue can't tell which jobs there are: {' '.join(done.stderr.split())}")
    found = {}
    for line in done.stdout.splitlines():
        job, state, why = [*line.strip().split("|"), "", ""][:3]
        if state not in ENDED:
            found[job] = QueuedJob(job, "queued" if state in QUEUED else "running", "" if why == "None" else why)
    return found


def _lives(pid: int) -> bool:
    """Whether a process of this machine is alive; one that has ended and that nobody has asked about is not."""
    try:
        state = Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, ValueError, IndexError):
        return False
    return state != "Z"
