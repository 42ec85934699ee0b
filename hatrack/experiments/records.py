"""All records of a folder, as a list and as a table of pandas."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hatrack.experiments import metrics
from hatrack.experiments.record import Record
from hatrack.experiments.record_parts import Costs
from hatrack.files.atomic import check_folder

TASK_COUNT = "number of tasks"
VARIABLE = (
    "seed",
    "method",
    "method_options",
    "method_digest",
    "watch_tasks",
    "router",
)  # the keys of a spec in which the records of a setting may differ
OPTIONS = {"method_options": "", "network_options": "network.", "benchmark_options": "benchmark.", "regime": "regime."}


class Records(list[Record]):
    """Records of a folder.

    Example:
        >>> import hatrack as hr
        >>> found = hr.records("records")
        >>> [(record.spec.method, record.spec.seed) for record in found][:1]
        [('agem', 0)]
    """

    def rows(self) -> list[dict[str, Any]]:
        """Return a table of plain values: a row per record, with its names, options, measures, costs and time.

        An option of the method has its own name, one of the network, the benchmark or the regime is called network.width,
        benchmark.data or regime.lr. Intransigence is nan without a record of `independent` at the same seed and setting.
        """
        alone = _independent(self)
        return [_row(record, alone.get(_place(record))) for record in self]

    def to_pandas(self) -> Any:
        """Return `rows` as a pandas DataFrame; pandas must be installed."""
        try:
            import pandas  # type: ignore[import-not-found,import-untyped,unused-ignore]
        except ImportError:
            raise ValueError(
                "pandas is not installed: pip install pandas; Records.rows() gives the same as a list"
            ) from None
        return pandas.DataFrame(self.rows())


def records(folder: Path | str) -> Records:
    """Return all records in a folder.

    Args:
        folder: the folder of the records, the `out` of `hatrack.run`.

    Returns:
        A list of records, sorted by the names of their files, with `to_pandas()`.

    Raises:
        ValueError: there are no records in the folder, or one of its JSON files is not a record.

    Example:
        >>> import hatrack as hr
        >>> found = hr.records("records")
        >>> all(0 <= record.summary["accuracy"] <= 1 for record in found)
        True
    """
    folder = Path(folder)
    check_folder(folder, f"`hatrack run BENCHMARK METHOD --out {folder}` would make one")
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise ValueError(f"no records in {folder}; `hatrack run BENCHMARK METHOD --out {folder}` would put one there")
    return Records(Record.load(path) for path in paths)


def common_spec(record: Record) -> dict[str, Any]:
    """Return the keys of a spec that the records of a setting share, and the number of tasks."""
    fixed = {key: value for key, value in record.spec.written.items() if key not in VARIABLE}
    return {**fixed, "regime": {**fixed["regime"], **untuned(record)}, TASK_COUNT: len(record.tasks)}


def untuned(record: Record) -> dict[str, Any]:
    """Return the values that tuned options of the regime would have had otherwise.

    A tuned learning rate counts as an option of the method, so that the run can be compared with others of the regime.
    """
    return dict(zip(record.tuned.get("regime", []), record.tuned.get("regime_without", []), strict=False))


def _place(record: Record) -> tuple[str, int]:
    """Return the setting and the seed of a record."""
    return json.dumps(common_spec(record), sort_keys=True), record.spec.seed


def _independent(records: Iterable[Record]) -> dict[tuple[str, int], Record]:
    """Return the records of `independent` by setting and seed, those with the fewest options if there are several."""
    found = [record for record in records if record.spec.method == "independent"]
    found.sort(key=lambda record: -len(record.spec.method_options) - len(untuned(record)))
    return {_place(record): record for record in found}


def _row(record: Record, independent: Record | None) -> dict[str, Any]:
    spec = record.spec
    lacks = metrics.intransigence(record.accuracy, independent.accuracy) if independent else math.nan
    names = {name: getattr(spec, name) for name in ("benchmark", "method", "network", "seed", "heads", "init", "scenario")}
    options = {f"{prefix}{name}": v for key, prefix in OPTIONS.items() for name, v in getattr(spec, key).items()}
    measures = {**record.summary, "intransigence": lacks, "parameters": record.parameters, "seconds": record.seconds.total}
    return {**names, **options, **measures, **(record.costs or Costs()).summary}
