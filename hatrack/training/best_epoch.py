"""Which epoch of a fit is the best, by the loss or the score on validation data, and when none was better for too long."""

import math
import warnings

from hatrack.methods.evaluate import Score
from hatrack.methods.fit import EpochResult
from hatrack.regime import Regime
from hatrack.tasks.task import Task


def to_lower(score: Score, regime: Regime) -> float:
    """Return what the best epoch has the lowest of: infinity for an epoch whose score is no number."""
    if regime.best_by == "loss":
        return score.loss
    return -score.accuracy if math.isfinite(score.accuracy) else math.inf


def stands_still(epochs: list[EpochResult], regime: Regime) -> bool:
    """Return whether no epoch was better for so long that the fit ends."""
    if not regime.stop_after or epochs[-1].valid_loss is None:
        return False
    scores = [math.nan if e.valid_accuracy is None else e.valid_accuracy for e in epochs]  # a state has None for NaN
    values = [to_lower(Score(e.valid_loss or 0.0, score), regime) for e, score in zip(epochs, scores, strict=True)]
    return len(values) - 1 - values.index(min(values)) >= regime.stop_after


def warn_of_no_effect(task: Task, regime: Regime) -> None:
    """Warn if options of the regime do nothing because a task has no validation data."""
    given = {"stop_after": regime.stop_after, "best_by": regime.best_by if regime.best_by != "loss" else ""}
    if not len(task.valid) and (said := [f"{name}={value!r}" for name, value in given.items() if value]):
        without = f"task {task.name!r} has no validation data"
        warnings.warn(f"{without}: {' and '.join(said)} {'do' if len(said) > 1 else 'does'} nothing", stacklevel=3)


def warn_of_no_score(score: Score | None, before: list[EpochResult], task: Task, regime: Regime) -> None:
    """Warn, once in a fit, if the score that decides which epoch is the best is no number."""
    if score is None or math.isfinite(score.accuracy) or regime.best_by == "loss":
        return
    values = [epoch.valid_accuracy for epoch in before]
    if all(value is not None and math.isfinite(value) for value in values):
        where = f"task {task.name!r}, epoch {len(values) + 1}"
        said = f"the validation score is {score.accuracy}; an epoch with such a score is never the best"
        warnings.warn(f"{where}: {said}", stacklevel=4)
