"""What a job of Slurm does: it carries out its runs, and saves and stops when Slurm says that its time is nearly over.

submitit calls a job, and calls its `checkpoint` from a signal handler when Slurm sends the signal. Training is done in a
thread: the handler, in the main thread, asks it to save and stop, waits for it, and the job is requeued by submitit.
"""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hatrack.experiments.parallel import run_all
from hatrack.experiments.run import folder_of
from hatrack.experiments.spec import Run
from hatrack.methods.divergence import Diverged
from hatrack.text import printable, shorten
from hatrack.training.checkpoint import Stopped, stopping

WAKE = 0.2  # seconds: Python handles signals between two waits


class SlurmJob:
    """The runs of one element of a job array.

    Args:
        runs: the runs.
        out: the folder of the records, which all nodes have.
        how: keyword arguments of `run_all`.
        notes: how the options of runs were chosen, by name.
        threads: of torch; runs beside each other share them.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        out: Path,
        how: Mapping[str, Any],
        notes: Mapping[str, Mapping[str, Any]],
        threads: int = 1,
    ) -> None:
        self.runs, self.out, self.how, self.notes, self.threads = list(runs), out, dict(how), dict(notes), threads
        self.thread: threading.Thread | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "thread": None}

    def __call__(self) -> int:
        """Carry out the runs; return how many have their records. Why others have none lies in their folders."""
        stopping.clear()
        torch.set_num_threads(self.threads)
        self.thread = threading.Thread(
            target=self._carry_out
        )  # no daemon: one in torch's C++ code aborts a process that ends
        self.thread.start()
        try:
            while self.thread.is_alive():
                self.thread.join(WAKE)
        except BaseException:  # this thread was interrupted: the other one ends after its step
            stopping.set()
            raise
        return sum(folder_of(spec, self.out).done for spec in self.runs)

    def checkpoint(self, *_: Any, **__: Any) -> Any:
        """Save and stop; return the job that is to be requeued."""
        import submitit

        stopping.set()
        if self.thread is not None:
            self.thread.join()
        return submitit.helpers.DelayedSubmission(self)

    def _carry_out(self) -> None:
        """Carry out the runs beside each other; if one fails, the others one after the other."""
        left = self._left()
        if len(left) > 1 and self.how.get("parallel", 1) > 1:
            self._try(left)
            left = [spec for spec in self._left() if not folder_of(spec, self.out).failure()]
        for spec in left:
            if stopping.is_set():
                return
            self._try([spec])

    def _left(self) -> list[Run]:
        models = self.how.get("keep_model") or self.how.get("keep_each")
        return [spec for spec in self.runs if models or not folder_of(spec, self.out).done]

    def _try(self, runs: Sequence[Run]) -> None:
        """Carry out runs; a single one that fails has its reason in its folder."""
        try:
            run_all(runs, self.out, notes=self.notes, **self.how)
        except Stopped:
            return
        except Exception as error:
            expected = isinstance(error, ValueError | OSError | MemoryError | Diverged)
            why = str(error) if expected else f"{type(error).__name__}: {error}"
            if len(runs) == 1:
                note_failure(runs[0], self.out, why)


def note_failure(spec: Run, out: Path, why: str) -> None:
    """Note why a run has no record, unless another process has it or nothing can be written."""
    try:
        with folder_of(spec, out) as folder:
            folder.note_failure(shorten(printable(why), 500))
    except (ValueError, OSError):
        return
