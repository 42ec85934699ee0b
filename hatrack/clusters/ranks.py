"""One run on several ranks: `run_on_ranks` starts them by torchrun, or is one of them if torchrun started this process.

A run on N ranks is the run with `--accumulate N`: the gradients of a batch are computed in N parts and added up in order,
here one part on each rank. Without dropout its results are those of one process, bit for bit.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from hatrack.clusters.engine import Failed
from hatrack.clusters.rank_main import be_rank, in_torchrun
from hatrack.experiments.record import Record
from hatrack.experiments.run import folder_of
from hatrack.experiments.spec import Run
from hatrack.methods import METHODS
from hatrack.methods.divergence import Diverged
from hatrack.training.checkpoint import Stopped

MAIN = "hatrack.clusters.rank_main"
WORST = ("failed", "diverged", "stopped")  # what one rank says of a run counts more than what the others say


def for_ranks(spec: Run, ranks: int) -> Run:
    """Return a run whose batches are computed in as many parts as there are ranks; raise a ValueError if they can't be.

    Args:
        spec: the run.
        ranks: how many processes there are.
    """
    method, regime = METHODS.find(spec.method), spec.regime
    if not method.splits_batches:
        raise ValueError(
            f"--ranks {ranks} is not for {spec.method}, whose loss needs whole batches; --parallel and --on carry out "
            "several runs at a time"
        )
    if regime.accumulate not in (1, ranks):
        raise ValueError(f"--ranks {ranks} computes batches in {ranks} parts, but --accumulate says {regime.accumulate}")
    return replace(spec, regime=replace(regime, accumulate=ranks))


def run_on_ranks(
    runs: Sequence[Run],
    out: Path,
    ranks: int,
    *,
    device: str,
    notes: Mapping[str, Mapping[str, Any]] | None = None,
    again: bool = False,
    engine: str = "auto",
    **how: Any,
) -> list[Record]:
    """Carry out runs one after the other, each on several processes that share its batches.

    Args:
        runs: what to run; each is carried out with `accumulate` = `ranks`.
        out: the folder of the records.
        ranks: how many processes.
        device: "cpu" or "cuda".
        notes: how the options of runs were chosen, by their names.
        again: run even what has a record.
        engine: "auto" or "eager": steps run eagerly.
        how: precision, save_every, keep_model, keep_each: see `run`.

    Returns:
        The records in the order of the runs.
    """
    if engine not in ("auto", "eager"):
        raise ValueError(f"--ranks {ranks} goes with --engine eager only, not with {engine}: steps exchange gradients")
    if device == "cuda" and not in_torchrun() and torch.cuda.device_count() < ranks:
        raise ValueError(f"--ranks {ranks} needs {ranks} GPUs on this machine, which has {torch.cuda.device_count()}")
    parts = [for_ranks(spec, ranks) for spec in runs]
    how |= {"device": device, "engine": "eager"}
    outcomes: list[Record | Diverged | Failed] = []
    for spec in parts:
        tuned = (notes or {}).get(spec.name)
        if in_torchrun():
            if int(os.environ["WORLD_SIZE"]) != ranks:
                raise ValueError(f"--ranks {ranks}, but torchrun started {os.environ['WORLD_SIZE']} processes")
            said = be_rank(spec, out, {**how, "tuned": tuned, "again": again})
        else:
            said = _launch(spec, out, ranks, {**how, "tuned": tuned, "again": again})
        outcomes.append(_outcome(spec, out, said))
    failed = [str(one) for one in outcomes if isinstance(one, Failed)]
    diverged = [str(one) for one in outcomes if isinstance(one, Diverged)]
    if failed:
        raise ValueError("\n".join([*failed, *diverged]))
    if diverged:
        raise Diverged("\n".join(diverged))
    return [one for one in outcomes if isinstance(one, Record)]


def _outcome(spec: Run, out: Path, said: Mapping[str, str]) -> Record | Diverged | Failed:
    match said["end"]:
        case "record":
            return Record.load(folder_of(spec, out).record)
        case "diverged":
            return Diverged(said["text"])
        case "stopped":
            raise Stopped(f"{said['text']}; the same command goes on from there")
    return Failed(said["text"])


def _launch(spec: Run, out: Path, ranks: int, how: Mapping[str, Any]) -> dict[str, str]:
    """Carry out a run by torchrun on this machine; return how it ended."""
    if folder_of(spec, out).done and not how["again"] and not how.get("keep_model") and not how.get("keep_each"):
        return {"end": "record", "text": ""}
    with tempfile.TemporaryDirectory(prefix="hatrack-ranks-") as folder:
        job = Path(folder) / "job"
        described = {**spec.spec, "network": spec.network, "weights": spec.weights}
        job.write_text(json.dumps({"spec": described, "out": str(out.absolute()), "how": dict(how)}))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [*torchrun, "--module", MAIN, str(job)]
        threads = str(max(1, torch.get_num_threads() // ranks))
        paths = [path for path in sys.path if path]
        env = {"OMP_NUM_THREADS": threads, **os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *paths])}
        with _pass_signals_on() as started:
            process = subprocess.Popen(command, env=env, start_new_session=True)
            started.append(process)
            code = process.wait()
        said = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("end-*"))]
    worst = [one for end in WORST for one in said if one["end"] == end]
    if not said or (code and not worst):
        return {"end": "failed", "text": f"the processes of {spec.name} were killed; too little memory?"}
    return dict(worst[0] if worst else said[0])


@contextmanager
def _pass_signals_on() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Within it Ctrl-C and requests to end go to torchrun, which passes them on to the ranks; they save and stop."""
    started: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in started:
            process.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield started
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
