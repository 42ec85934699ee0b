"""The results of a part of a recipe: its rows' records, found among all by what was run, and what they come to."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from hatrack.experiments.beginning import beginning
from hatrack.experiments.metrics import Matrix
from hatrack.experiments.record import Record
from hatrack.experiments.record_parts import Spec
from hatrack.experiments.statistics import Differences
from hatrack.inspection.flatness import Flatness
from hatrack.options import nearest
from hatrack.recipes.quantities import Quantity, References, ratios
from hatrack.recipes.recipe import Comparison, Part, Row
from hatrack.recipes.timings import PenaltyTimes
from hatrack.reporting.measures import MeanStd, mean_std

ANY = ("seed", "watch_tasks")


class Records(dict[str, dict[int, Record]]):
    """Records by what was run, then by seed.

    Attributes:
        flatness: the flatness of runs for which it was measured, by the name of the record.
        timings: what was timed besides runs, by the name of its file.
    """

    flatness: Mapping[str, Flatness] = {}
    timings: Mapping[str, PenaltyTimes] = {}


def index(
    records: Iterable[Record],
    flatness: Mapping[str, Flatness] | None = None,
    timings: Mapping[str, PenaltyTimes] | None = None,
) -> Records:
    """Sort records by what was run, whatever the seed. A record with a router is one without it as well, with more in it."""
    found = Records()
    found.flatness, found.timings = flatness or {}, timings or {}
    for record in sorted(records, key=lambda record: "watch_tasks" in record.spec.written):  # watched ones replace others
        for key in {_key(record.spec), _key(record.spec, "router")}:
            found.setdefault(key, {})[record.spec.seed] = record
    return found


def _key(spec: Spec, *left_out: str) -> str:
    """Return what was run, whatever the seed, and whether or not tasks were watched, which changes nothing of it."""
    return json.dumps({k: v for k, v in spec.written.items() if k not in (*ANY, *left_out)}, sort_keys=True)


def _of_row(row: Row, records: Records) -> dict[int, Record]:
    """Return the records of a row by seed, cut to its tasks."""
    found = records.get(_key(Spec.from_dict(row.run.spec)), {})
    return {seed: beginning(record, row.first) for seed, record in found.items()} if row.first else found


class Results:
    """The records of a part by the labels of its rows, and the quantities that follow from them.

    Args:
        part: the part.
        records: all records that there are, see `index`.
    """

    def __init__(self, part: Part, records: Records) -> None:
        self.part = part
        self.rows = {row.label: row for row in part.rows}
        self.by_seed = {row.label: _of_row(row, records) for row in part.rows}
        self.flatness = records.flatness
        self.timings: Mapping[str, PenaltyTimes] = records.timings

    def records(self, label: str) -> list[Record]:
        """Return the records of a row in order of their seeds, also of seeds that the row does not ask for."""
        return [record for _, record in sorted(self.by_seed.get(label, {}).items())]

    def missing(self, row: Row) -> list[int]:
        """Return the seeds that a row asks for and that have no record, or lack what the row wants beside it: the accuracy
        after each epoch, the flatness."""
        found = self.by_seed[row.label]
        return [seed for seed in row.seeds if seed not in found or not self._whole(row, found[seed])]

    def _whole(self, row: Row, record: Record) -> bool:
        watched = record.spec.watch_tasks or not row.run.watch_tasks
        return watched and (record.name in self.flatness or not self.part.flatness)

    def references(self, label: str, seed: int) -> References:
        """Return the references of a row at a seed; of one with more tasks than the row its beginning."""
        row, own = self.rows[label], self.by_seed[label].get(seed)

        def reference(*labels: str) -> Record | None:
            found = next(filter(None, (self.by_seed.get(name, {}).get(seed) for name in labels)), None)
            return beginning(found, len(own.tasks)) if found and own and len(found.tasks) > len(own.tasks) else found

        return References(reference(*row.joint), reference(row.random), self.flatness.get(own.name) if own else None)

    def values(self, label: str, quantity: Quantity) -> list[float]:
        """Return a quantity of a row at every seed."""
        return [quantity.value(record, self.references(label, record.spec.seed)) for record in self.records(label)]

    def summary(self, label: str, quantity: Quantity) -> MeanStd | None:
        """Return mean, standard deviation and number of seeds; None if no seed has a finite value."""
        if label not in self.rows:
            raise ValueError(f"the part {self.part.name} has no row {label!r}; {nearest(label, self.rows)}")
        return mean_std(self.values(label, quantity))

    def mean(self, label: str, quantity: Quantity) -> float | None:
        """Return the mean over seeds; None if there is none."""
        found = self.summary(label, quantity)
        return found.mean if found else None

    def flatness_of(self, label: str) -> list[Flatness]:
        """Return the flatness of a row at every seed for which it was measured."""
        return [self.flatness[r.name] for r in self.records(label) if r.name in self.flatness]

    def ratios(self, label: str) -> list[Matrix]:
        """Return the forgetting ratio after every number of tasks, at every seed that has both references."""
        found = [ratios(r, self.references(label, r.spec.seed)) for r in self.records(label)]
        return [line for line in found if line is not None]

    def holds(self, compared: Comparison) -> bool | None:
        """Return whether a comparison holds by the means; None if that hangs on a missing row."""
        sign = -1 if compared.less else 1
        first, *rest = (self.mean(label, compared.quantity) for label in (compared.label, *compared.others))
        known = [value for value in rest if value is not None] if compared.others else [0.0]
        if first is None:
            return None
        more = [sign * first > sign * value + compared.by for value in known]
        decisive = compared.some  # the answer that one row gives for all
        if decisive in more:
            return decisive
        return not decisive if len(known) >= len(rest) else None

    def differences(self, compared: Comparison) -> dict[str, Differences]:
        """Return by how much more than it must a row has (or less, if that is compared), at every seed that both have.

        Args:
            compared: a row and the others.

        Returns:
            The differences by the label of the other row, in order of the seeds; those that are not finite are left out.
            From a number they have an empty label.
        """
        sign, own = -1 if compared.less else 1, self._by_seed(compared.label, compared.quantity)
        found = {}
        for label in compared.others or ("",):
            other = self._by_seed(label, compared.quantity) if label else dict.fromkeys(own, 0.0)
            both = [sign * (own[seed] - other[seed]) - compared.by for seed in sorted(own.keys() & other.keys())]
            found[label] = np.array([value for value in both if math.isfinite(value)], dtype=np.float64)
        return found

    def _by_seed(self, label: str, quantity: Quantity) -> dict[int, float]:
        return {r.spec.seed: quantity.value(r, self.references(label, r.spec.seed)) for r in self.records(label)}


def rank_correlation(ours: Sequence[float], published: Sequence[float]) -> float:
    """Return Spearman's rank correlation of two lists; ties have the mean of their ranks."""
    a, b = _ranks(ours), _ranks(published)
    a, b = a - a.mean(), b - b.mean()
    size = math.sqrt((a @ a) * (b @ b))
    return float(a @ b / size) if size else math.nan


def _ranks(values: Sequence[float]) -> Matrix:
    array = np.asarray(values, dtype=np.float64)
    return np.array([(array < v).sum() + ((array == v).sum() - 1) / 2 for v in array])
