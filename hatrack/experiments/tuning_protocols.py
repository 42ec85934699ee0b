"""Protocols of a search: on which data options are chosen. The objective is computed from validation accuracies alone."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hatrack._version import __version__
from hatrack.experiments.metrics import mean
from hatrack.experiments.record import clean
from hatrack.experiments.spec import Run
from hatrack.experiments.tuning_space import Space, grid_size
from hatrack.methods import METHODS
from hatrack.options import parameters
from hatrack.regime import Regime

Matrix = Sequence[Sequence[float | None]]  # entry [t][i]: the accuracy on the validation data of task i after task t


class Caution(NamedTuple):
    """What a reader must know about a result because of how its options were chosen.

    Attributes:
        short: a few words for the row of a table.
        text: a sentence without its full stop.
    """

    short: str
    text: str


class Protocol(NamedTuple):
    """A way to choose options.

    Attributes:
        summary: what the choice is made on, for help texts.
        caution: holds for all results with such options; None if there is nothing to say.
        own_seed: holds for results at a seed that the search used; None if there is nothing to say.
    """

    summary: str
    caution: Caution | None = None
    own_seed: Caution | None = None


PROTOCOLS = {
    "first-tasks": Protocol(
        "the validation data of the first tasks of one seed; only these are trained",
        own_seed=Caution(
            "tuned on the first tasks of this seed",
            "its options were chosen on the validation data of the first tasks of this very seed, so that its results on "
            "these tasks are a little too kind; results at other seeds are not",
        ),
    ),
    "one-seed": Protocol(
        "the validation data of the whole sequence of one seed",
        own_seed=Caution(
            "tuned on this seed",
            "its options were chosen on the validation data of this very seed, which is too kind: "
            "a learner that meets its tasks one after the other could not have chosen them; report other seeds",
        ),
    ),
    "transfer": Protocol("the validation data of another benchmark"),
    "whole-stream": Protocol(
        "the validation data of the whole sequence of all seeds that are reported",
        Caution(
            "tuned on the whole stream",
            "its options were chosen on the whole sequence of the seeds that are reported, which is too kind: "
            "a learner that meets its tasks one after the other could not have chosen them",
        ),
    ),
}


def caution_of(note: Mapping[str, Any], seed: int) -> Caution | None:
    """Return the caution that a result needs because of how its options were chosen; None if it needs none.

    Args:
        note: what the record tells of the search, see `Tuned.note`; empty if there was none.
        seed: the seed of the result.
    """
    protocol = PROTOCOLS.get(str(note.get("protocol")))
    if protocol is None or protocol.caution:
        return protocol and protocol.caution
    seeds = note.get("seeds")
    return protocol.own_seed if isinstance(seeds, list) and seed in seeds else None


FIRST_TASKS = 3  # by default


@dataclass(frozen=True)
class Search:
    """Everything that decides which trials a search makes and what they give, apart from their number.

    Attributes:
        benchmark: the benchmark for which options are chosen.
        method: the method.
        space: what is searched, by the names of options of the method and of the regime.
        protocol: a name in `PROTOCOLS`.
        seeds: the seeds of the runs of every trial; the first one is that of the search.
        on: the benchmark on which the trials are run, of the protocol "transfer"; "" otherwise.
        tasks_used: how many tasks are trained, of the protocol "first-tasks"; 0 otherwise.
        network: the network; "" for the benchmark's own.
        given: the options that are the same in all trials, by what they belong to, as `Run` takes them.
        sampler: "tpe", "grid" or "random".
        pruner: "none" or "median".
        points: the number of values per range, of the sampler "grid".
    """

    benchmark: str
    method: str
    space: Space
    protocol: str = "first-tasks"
    seeds: tuple[int, ...] = (0,)
    on: str = ""
    tasks_used: int = 0
    network: str = ""
    given: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sampler: str = "tpe"
    pruner: str = "none"
    points: int = 5

    @property
    def name(self) -> str:
        """The name of the folder and of the outcome: benchmark, method and protocol."""
        method = "".join(c if c.isalnum() or c in "-_" else "-" for c in self.method)
        return "-".join(filter(None, [self.benchmark, method, self.protocol, self.on]))

    @property
    def trial_benchmark(self) -> str:
        """The benchmark on which the trials are run."""
        return self.on or self.benchmark

    @property
    def spec(self) -> dict[str, Any]:
        """The search as a dict for JSON."""
        plain = {**vars(self), "space": {name: str(axis) for name, axis in self.space.items()}}
        result: dict[str, Any] = clean({**plain, "given": {key: dict(table) for key, table in self.given.items() if table}})
        return result

    def limit(self, budget: int) -> int:
        """Return how many trials a budget allows: a grid has no more than its points."""
        return min(budget, grid_size(self.space, self.points)) if self.sampler == "grid" else budget

    def split(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the values that belong to the method and those that belong to the regime."""
        own = parameters(METHODS.find(self.method))
        return ({k: v for k, v in values.items() if k in own}, {k: v for k, v in values.items() if k not in own})

    def runs(self, values: Mapping[str, Any]) -> list[Run]:
        """Return the runs of a trial, one per seed."""
        method, regime = self.split(values)
        given: dict[str, Any] = {key: self.given.get(key, {}) for key in ("benchmark_options", "network_options")}
        return [
            Run(
                self.trial_benchmark,
                self.method,
                seed,
                network=self.network,
                regime=Regime(**{**self.given.get("regime", {}), **regime}),
                method_options={**self.given.get("method_options", {}), **method},
                **given,
                **{**self.given.get("run", {}), **({"first_tasks": self.tasks_used} if self.tasks_used else {})},
            )
            for seed in self.seeds
        ]

    @property
    def defaults(self) -> dict[str, Any] | None:
        """The default values of what is searched; None if one of them is not in the space."""
        known = {**parameters(Regime), **parameters(METHODS.find(self.method))}
        values = {name: known[name].default for name in self.space}
        return values if all(axis.contains(values[name]) for name, axis in self.space.items()) else None


def progress_value(rows: Matrix) -> float:
    """Return the mean validation accuracy over the tasks learned so far, after the last of them; nan without such data."""
    last = rows[-1][: len(rows)]
    return mean([math.nan if value is None else value for value in last])


def objective(matrices: Sequence[Matrix]) -> float:
    """Return what a search maximises: the mean validation accuracy over all tasks at the end, averaged over the seeds.

    It is given the matrices of accuracies on validation data, one per seed, and nothing else, so that no number of the
    test data can reach it.
    """
    return math.fsum(map(progress_value, matrices)) / len(matrices)


def versions_of_search(optuna: str) -> dict[str, str]:
    """Return the versions that a search depends on."""
    return {"hatrack": __version__, "optuna": optuna}
