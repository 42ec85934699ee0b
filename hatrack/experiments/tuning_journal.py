"""The trials of a search in Optuna's journal file, which several processes share and which survives kills.

A process holds the lock of the journal while it writes to it, and the lock of a trial for as long as it runs the trial. The
system frees both when a process dies, so a trial that is marked as running and whose lock is free was interrupted.

The options of trial k depend only on the seed, on k and on the trials before it: they are sampled in a study in memory, by a
sampler that is made for this trial, and written to the journal in one piece.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from hatrack.experiments.tuning_protocols import Search
from hatrack.experiments.tuning_space import Range, to_parameters
from hatrack.files.atomic import writable
from hatrack.seeds import derive

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial, TrialState

STARTUP = 5  # trials before the sampler or the pruner learns from earlier ones
MISSING = "hatrack tune needs Optuna, which is not installed: pip install 'hatrack[tune]'"


def load_optuna() -> Any:
    """Import Optuna and return it; raise a ValueError with the command that installs it if it is missing."""
    try:
        import optuna
    except ImportError:
        raise ValueError(MISSING) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


class Journal:
    """The trials of one search.

    Args:
        folder: the folder of the search; it is made if it does not exist.
        search: what is searched.
    """

    def __init__(self, folder: Path, search: Search) -> None:
        self.optuna, self.folder, self.search = load_optuna(), writable(folder), search
        self.lock = FileLock(folder / "journal.lock")
        journal = self.optuna.storages.journal
        with self.lock:
            _cut_torn_line(folder / "journal.log")
            backend = journal.JournalFileBackend(str(folder / "journal.log"), lock_obj=_JournalLock(self.lock))
            self.storage = self.optuna.storages.JournalStorage(backend)
            self.study = self.optuna.create_study(
                storage=self.storage, study_name=search.name, direction="maximize", load_if_exists=True
            )
            self._check_same_search()
        self.study_id = self.storage.get_study_id_from_name(search.name)

    def _check_same_search(self) -> None:
        """Raise a ValueError if the journal is that of a search with other options, another space or another seed."""
        known = self.study.user_attrs.get("search")
        if known is None:
            self.study.set_user_attr("search", self.search.spec)
            return
        own = json.loads(json.dumps(self.search.spec))
        if changed := sorted(name for name in own.keys() | known.keys() if own.get(name) != known.get(name)):
            one, two = (json.dumps(table.get(changed[0])) for table in (known, own))
            raise ValueError(
                f"{self.folder} holds another search: its {changed[0]} is {one}, not {two}; choose another folder with --out"
            )

    @property
    def trials(self) -> list["FrozenTrial"]:
        """All trials, in the order of their numbers."""
        found: list[FrozenTrial] = self.study.get_trials(deepcopy=True)
        return found

    @contextmanager
    def next_trial(self, budget: int) -> Iterator["FrozenTrial | None"]:
        """Yield the trial to run next, and keep other processes from it within the block.

        A trial that was interrupted comes first. Otherwise it is a new one, or None if the budget is spent.
        """
        trial, lock = None, None
        with self.lock:
            trials = self.trials
            for old in trials[: self.search.limit(budget)]:
                if not old.state.is_finished() and (lock := self._lock_of(old.number)):
                    trial = old
                    break
            if trial is None and len(trials) < self.search.limit(budget):
                self.study.add_trial(propose(self.search, trials))
                trial, lock = self.trials[-1], self._lock_of(len(trials))
        try:
            yield trial
        finally:
            if lock is not None:
                Path(lock.lock_file).unlink(missing_ok=True)
                lock.release()

    def _lock_of(self, number: int) -> FileLock | None:
        """Return the lock of a trial, taken; None if another process has it."""
        lock = FileLock(self.folder / f"trial-{number}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return None
        return lock

    def report(self, number: int, step: int, value: float) -> None:
        """Write how good a trial is after a task, unless that was written before an interruption."""
        with self.lock:
            if step not in self.trials[number].intermediate_values:
                self.storage.set_trial_intermediate_value(self._id(number), step, value)

    def below_median(self, number: int) -> bool:
        """Return whether the pruner would stop a trial after the task that it reported last."""
        trial = self.trials[number]
        if self.search.pruner == "none" or not trial.intermediate_values:
            return False
        # Optuna compares the best value of all steps, but the mean accuracy falls from task to task for all
        # trials: only the last step can be compared with the median of that step.
        last = max(trial.intermediate_values)
        trial.intermediate_values = {last: trial.intermediate_values[last]}
        before = [other for other in self.trials if other.number != number]
        study = self.optuna.create_study(direction="maximize")
        study.add_trials(before)
        return bool(self.optuna.pruners.MedianPruner(n_startup_trials=STARTUP).prune(study, trial))

    def finish(self, number: int, value: float, *, pruned: bool = False, note: str = "") -> None:
        """Write the value of a trial, which ends it."""
        states = self.optuna.trial.TrialState
        with self.lock:
            if note:
                self.storage.set_trial_user_attr(self._id(number), "note", note)
            state: TrialState = states.PRUNED if pruned else states.COMPLETE
            self.storage.set_trial_state_values(self._id(number), state, [value])

    def _id(self, number: int) -> int:
        return int(self.storage.get_trial_id_from_study_id_trial_number(self.study_id, number))


def propose(search: Search, before: Sequence["FrozenTrial"]) -> "FrozenTrial":
    """Return the next trial of a search.

    The first one has the default options, if they are in the space and the search is not on a grid, so that what is chosen
    is no worse than they are on validation data.

    Args:
        search: what is searched.
        before: all trials before it.
    """
    optuna = load_optuna()
    seed = derive(search.seeds[0], "trial", len(before)) % 2**32
    if search.sampler == "grid":
        points = {name: axis.points(search.points) for name, axis in search.space.items()}
        sampler: Any = optuna.samplers.GridSampler(points, seed=derive(search.seeds[0], "grid") % 2**32)
    elif search.sampler == "random":
        sampler = optuna.samplers.RandomSampler(seed=seed)
    else:
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP)
    distributions = {name: _distribution(optuna, axis) for name, axis in search.space.items()}
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.add_trials(before)
    asked = study.ask(fixed_distributions=distributions)
    parameters = {
        name: axis.rounded(asked.params[name]) if isinstance(axis, Range) else asked.params[name]
        for name, axis in search.space.items()
    }
    if not before and search.sampler != "grid" and search.defaults is not None:
        parameters = to_parameters(search.space, search.defaults)
    return optuna.trial.create_trial(  # type: ignore[no-any-return]
        state=optuna.trial.TrialState.RUNNING,
        params=parameters,
        distributions=distributions,
        system_attrs=study.trials[-1].system_attrs,
    )


def _distribution(optuna: Any, axis: Any) -> Any:
    if not isinstance(axis, Range):
        return optuna.distributions.CategoricalDistribution(axis.points(0))
    if axis.whole:
        return optuna.distributions.IntDistribution(int(axis.low), int(axis.high), log=axis.log)
    return optuna.distributions.FloatDistribution(axis.low, axis.high, log=axis.log)


def _cut_torn_line(path: Path) -> None:
    """Remove the end of a journal that was half written when a process was killed: a whole entry ends with a newline."""
    if path.is_file() and not (content := path.read_bytes()).endswith(b"\n") and content:
        with path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)


class _JournalLock:
    """The lock of a journal as Optuna asks for it. Optuna's own locks stay behind when a process is killed."""

    def __init__(self, lock: FileLock) -> None:
        self.lock = lock

    def acquire(self) -> bool:
        self.lock.acquire()
        return True

    def release(self) -> None:
        self.lock.release()
