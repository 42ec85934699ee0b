"""The log of a run: what its lines begin with, how they end, and lines that only a saved state still has."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hatrack.experiments.run_folder import RunFolder
from hatrack.experiments.spec import Run
from hatrack.inspection.layers import layer_titles
from hatrack.methods.fit import FitResult
from hatrack.methods.method import Method
from hatrack.tasks.targets import other_score
from hatrack.tasks.task import Task
from hatrack.tracking.log import EpochLog
from hatrack.tracking.tracker import Tracker
from hatrack.training.checkpoint import Stopped


def open_log(
    spec: Run,
    tasks: Sequence[Task],
    method: Method,
    folder: RunFolder | None,
    trackers: Sequence[Tracker],
    device: torch.device | str,
    began: float,
) -> EpochLog:
    """Return the log of a run, which has read the lines of processes before and begun those of this one.

    Args:
        spec: the run.
        tasks: its tasks.
        method: its method.
        folder: the files of the run; None to keep no lines.
        trackers: what is given each line.
        device: where it runs.
        began: when it began, by `time.perf_counter`.
    """
    if folder:
        folder.checkpointer.make_folder()
    log = EpochLog(folder.lines if folder else None, trackers)
    log.began = began
    scores = {other_score(task.target) for task in tasks}
    score = scores.pop() if len(scores) == 1 else "score"
    about = {"spec": spec.spec, "score": score, "layers": layer_titles(method.net.trunk), "device": str(device)}
    log.open(name=spec.name, tasks=[task.name for task in tasks], **about)
    return log


def end_log(log: EpochLog, kind: object, error: BaseException | None, trace: object) -> None:
    """Say in the lines of a run why it ends; for an `ExitStack`."""
    log.end("finished" if error is None else "stopped" if isinstance(error, Stopped) else f"{type(error).__name__}: {error}")


def restore_lines(log: EpochLog, fits: Sequence[FitResult], saved: Mapping[str, Any]) -> None:
    """Write the lines of finished tasks that a saved state has and the file of lines has not.

    Args:
        log: the log of the run.
        fits: the results of all fits of finished tasks.
        saved: what was measured before the task that the run goes on with.
    """
    log.spent = saved["spent"]
    numbered = _numbered(fits)
    for task in range(saved["task"]):
        for number, result in numbered:
            if result.task == task:
                log.restore(task, number, len(result.epochs), result)
        if task not in log.lines.tasks and any(result.task == task for result in fits):
            log.task(task, saved["usage"][task] if task < len(saved.get("usage", [])) else {}, measured=False)
        if task not in log.lines.scores and task < len(saved["tests"]):
            log.scores(task, [score[1] for score in saved["tests"][task]], measured=False)


def _numbered(results: Sequence[FitResult]) -> list[tuple[int, FitResult]]:
    """Return the results of fits with their numbers among those of their task."""
    seen, found = Counter[int](), []
    for result in results:
        found.append((seen[result.task], result))
        seen[result.task] += 1
    return found
