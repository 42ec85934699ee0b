"""The main function of a rank, which torchrun starts: it carries out a run together with the other ranks."""

import json
import math
import os
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import distributed

from hatrack.clusters.jobs import read_files, write_files
from hatrack.clusters.rank_group import RankGroup, asked_to_stop, joined
from hatrack.experiments.progress import Display, describe
from hatrack.experiments.run import folder_of, run
from hatrack.experiments.spec import Run
from hatrack.files.atomic import write
from hatrack.methods.divergence import Diverged
from hatrack.text import one_line, printable, shorten
from hatrack.training.checkpoint import Stopped, stopping
from hatrack.training.progress import ProgressEvent

ENDS = "end-{}"  # the file in which a rank says how its run ended


def in_torchrun() -> bool:
    """Whether torchrun started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def be_rank(spec: Run, out: Path, how: Mapping[str, Any]) -> dict[str, str]:
    """Carry out a run as one of its ranks. The first rank has the folder; the others go on from the same states.

    Args:
        spec: what to run.
        out: the folder of the records.
        how: keyword arguments of `run`.

    Returns:
        How it ended: "end" is "record", "diverged", "stopped" or "failed", "text" says why.
    """
    stopping.clear()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: asked_to_stop.set())
    try:
        with joined(str(how["device"])) as group:
            return _run(spec, out, dict(how), group)
    except Diverged as error:
        return {"end": "diverged", "text": str(error)}
    except Stopped as error:
        return {"end": "stopped", "text": str(error)}
    except Exception as error:
        if asked_to_stop.is_set():
            return {"end": "stopped", "text": "stopped before the next step, and what was saved before is there"}
        expected = isinstance(error, ValueError | OSError | MemoryError)
        text = str(error) if expected else f"{type(error).__name__}: {error}"
        return {"end": "failed", "text": shorten(printable(text), 500)}


def _run(spec: Run, out: Path, how: dict[str, Any], group: RankGroup) -> dict[str, str]:
    folder = folder_of(spec, out)
    models = how.get("keep_model") or how.get("keep_each")
    first = group.rank == 0
    shared: list[Any] = [None]
    if first:
        if how["again"]:
            with folder:
                folder.start_anew()
        shared = [(folder.done and not models, read_files(folder))]
    distributed.broadcast_object_list(shared, src=0)
    done, files = shared[0]
    how["again"] = False  # the mark that the record is to be replaced is among the files
    if done:
        return {"end": "record", "text": ""}
    with (
        nullcontext(str(out)) if first else tempfile.TemporaryDirectory(prefix="hatrack-rank-") as place,
        Display(1) if first else nullcontext() as display,
    ):
        if not first:  # only the first rank saves; what it saved was sent to the others
            write_files(folder_of(spec, Path(place)), files)
            how |= {"save_every": math.inf}
            warnings.simplefilter("ignore")  # the first rank tells

        def progress(event: ProgressEvent) -> None:
            if display is not None:
                display.show(0, *describe(spec, event))

        record = run(spec, Path(place), **how, progress=progress, ranks=group)
        group.check_equal("results", (record.accuracy, record.loss))  # it also waits until the first rank has the record
    return {"end": "record", "text": ""}


def main(job: Path) -> None:
    """Carry out the run in a file that `run_on_ranks` wrote, and say beside it how it ended."""
    warnings.formatwarning = one_line
    given = json.loads(job.read_text())
    spec = Run.from_spec(given["spec"], own=[given["spec"]["method"]])  # of the process that started this one
    write(job.parent / ENDS.format(os.environ["RANK"]), json.dumps(be_rank(spec, Path(given["out"]), given["how"])))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
