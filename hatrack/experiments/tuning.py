"""A search for options: trials that are normal runs with records, and the outcome. It continues where it was stopped."""

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hatrack.experiments.progress import describe
from hatrack.experiments.record import Record
from hatrack.experiments.run import folder_of, run
from hatrack.experiments.spec import Run
from hatrack.experiments.tuned import Tuned
from hatrack.experiments.tuning_journal import Journal
from hatrack.experiments.tuning_protocols import Matrix, Search, objective, progress_value, versions_of_search
from hatrack.experiments.tuning_space import to_values
from hatrack.files.atomic import writable
from hatrack.methods.divergence import Diverged
from hatrack.training.checkpoint import Stopped, stopping
from hatrack.training.progress import ProgressEvent

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

SEED_STEP = 10_000  # the step of task t of the s-th seed is s * SEED_STEP + t
POLL = 0.5  # seconds between two looks whether another process has finished the same run
Show = Callable[[int, float, str], None]  # the number of a trial, how much of it is done, and where it stands
ShowRun = Callable[[float, str], None]  # the same of one run
Carry = Callable[..., Record]  # carries out a run: see `run_here`


class Pruned(Exception):  # noqa: N818
    """A trial is below the median of the others after the same task."""


class Finished(NamedTuple):
    """A trial that has ended.

    Attributes:
        number: of the trial, from 0.
        state: "complete", "pruned" or "diverged".
        value: the mean accuracy, or another score, on validation data; 0 or less if it diverged.
        options: what was tried.
    """

    number: int
    state: str
    value: float
    options: dict[str, Any]


def tune(
    search: Search,
    out: Path,
    trials: int,
    *,
    show: Show | None = None,
    tell: Callable[[Finished, Finished], None] | None = None,
    carry: Carry | None = None,
    **how: Any,
) -> Tuned | None:
    """Carry out a search, or continue it. Several processes may carry out the same one.

    Args:
        search: what is searched.
        out: the folder of the search and of its outcome, `search.name`.json.
        trials: how many trials there are in all, those of other processes included.
        show: is told how far a trial is, after every epoch.
        tell: is told of every trial that ends in this process, and of the best one so far.
        carry: carries out a run of a trial; by default `run_here`.
        how: device, engine, precision and save_every, as `run` takes them.

    Returns:
        The outcome; None if another process has not finished its trials.
    """
    journal = Journal(out / search.name, search)
    while True:
        with journal.next_trial(trials) as trial:
            if trial is None:
                break
            _carry_out(journal, trial, show, carry or run_here, how)
        if tell:
            done = finished(journal)
            tell(next(one for one in done if one.number == trial.number), best_of(done))
    return conclude(journal, out, trials)


def conclude(journal: Journal, out: Path, trials: int) -> Tuned | None:
    """Write the outcome of a search and return it; None if trials are missing that another process has not finished."""
    search = journal.search
    done = finished(journal)[: search.limit(trials)]
    if len(done) < search.limit(trials):
        return None
    best = best_of(done)
    if best.state == "diverged":
        raise Diverged(f"all {len(done)} trials of {search.method} on {search.trial_benchmark} diverged; try smaller values")
    method, regime = search.split(best.options)
    rows = [one._asdict() for one in done]
    versions = versions_of_search(journal.optuna.__version__)
    tuned = Tuned(search.spec, method, regime, best.value, trials, rows, versions, score_of(journal.folder))
    tuned.save(out / f"{search.name}.json")
    return tuned


def score_of(folder: Path) -> str:
    """Return the name of the score of a search by the records in its folder: "accuracy" unless they say otherwise."""
    path = min((folder / "records").glob("*.json"), default=None)
    return "accuracy" if path is None else Record.load(path).score


def finished(journal: Journal) -> list[Finished]:
    """Return the trials that have ended, in the order of their numbers."""
    return [
        Finished(
            trial.number,
            "diverged" if "note" in trial.user_attrs else trial.state.name.lower(),
            trial.value or 0.0,
            to_values(journal.search.space, trial.params),
        )
        for trial in journal.trials
        if trial.state.is_finished()
    ]


def best_of(done: list[Finished]) -> Finished:
    """Return the trial with the highest value, the first one of several; those that were pruned do not count."""
    whole = [one for one in done if one.state == "complete"]
    return max(whole or done, key=lambda one: (one.value, -one.number))


def run_here(spec: Run, records: Path, *, after_task: "Watch", show: ShowRun | None, **how: Any) -> Record:
    """Carry out a run of a trial in this process.

    Args:
        spec: what to run.
        records: the folder of the records of the search.
        after_task: is given the accuracies on validation data after every task, and may end the run.
        show: is told how far the run is.
        how: device, engine, precision and save_every.
    """

    def progress(event: ProgressEvent) -> None:
        if show:
            show(*describe(spec, event))

    return run(_free(spec, records), records, after_task=after_task, progress=progress, **how)


def _carry_out(journal: Journal, trial: "FrozenTrial", show: Show | None, carry: Carry, how: Mapping[str, Any]) -> None:
    """Carry out the runs of a trial and write its value to the journal."""
    number, records = trial.number, journal.folder / "records"
    runs = journal.search.runs(to_values(journal.search.space, trial.params))
    matrices: list[Matrix] = []
    try:
        if journal.below_median(number):  # it was interrupted before the pruner could end it
            raise Pruned
        for place, spec in enumerate(runs):
            watch = Watch(journal, number, place, last=place == len(runs) - 1)
            record = carry(spec, records, after_task=watch, show=show and partial(show, number), **how)
            watch.report(record.valid_accuracy)  # of a run that had its record
            matrices.append(record.valid_accuracy)
        journal.finish(number, objective(matrices))
    except Pruned:
        steps = journal.trials[number].intermediate_values
        journal.finish(number, steps[max(steps)], pruned=True)
    except Diverged as error:
        journal.finish(number, min([0.0, *(one.value for one in finished(journal))]), note=str(error))
    else:
        return
    for spec in runs:  # what a run that will not go on has saved
        with folder_of(spec, records) as folder:
            if not folder.done:
                folder.remove_states()


class Watch:
    """Reports a run after every task, and ends it if the pruner says so. It is given validation accuracies only."""

    def __init__(self, journal: Journal, number: int, place: int, last: bool) -> None:
        self.journal, self.number, self.place, self.last = journal, number, place, last

    def __call__(self, rows: Matrix) -> None:
        self.report(rows)
        if not self._ends_trial(rows) and self.journal.below_median(self.number):
            raise Pruned

    def report(self, rows: Matrix) -> None:
        """Write the mean accuracy after each of the tasks learned, apart from the one that ends the trial."""
        for count in range(1, len(rows) + 1):
            value = progress_value(rows[:count])
            if math.isnan(value):
                benchmark = self.journal.search.trial_benchmark
                raise ValueError(
                    f"task {count} of {benchmark} has no validation data to choose by; --valid 0.15 may hold some out"
                )
            if not self._ends_trial(rows[:count]):
                self.journal.report(self.number, self.place * SEED_STEP + count, value)

    def _ends_trial(self, rows: Matrix) -> bool:
        return self.last and len(rows) == len(rows[-1])


def _free(spec: Run, records: Path) -> Run:
    """Return the run when no other process runs the same one; two trials may have the same options."""
    writable(records)
    while folder_of(spec, records).blocked:
        if stopping.is_set():
            raise Stopped("stopped before the next run")
        time.sleep(POLL)
    return spec
