"""Records into numbers: which of them can be compared, and the mean and spread of every measure over seeds."""

import csv
import io
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from hatrack.experiments import metrics
from hatrack.experiments.record import Record, clean
from hatrack.methods import METHODS
from hatrack.options import parameters
from hatrack.reporting.measures import MEASURES, MISSING, Spread, deviation, number, spread
from hatrack.text import printable

REFERENCES = ("joint", "random")  # what could be reached, and what guessing gives; shown beside the others, not ranked
TASKS = "number of tasks"


@dataclass(frozen=True)
class Row:
    """One method of a setting: every measure over its seeds; None where no seed has it."""

    label: str
    seeds: tuple[int, ...]
    reference: bool
    measures: dict[str, Spread | None]


@dataclass(frozen=True)
class Setting:
    """Records that differ in method and seed alone, and so can be compared."""

    title: str
    spec: dict[str, Any]  # what they have in common
    methods: dict[str, list[Record]]  # by label, in order of their seeds

    @property
    def records(self) -> list[Record]:
        return [record for group in self.methods.values() for record in group]

    @property
    def seeds(self) -> list[int]:
        return sorted({record.spec["seed"] for record in self.records})

    @property
    def same_tasks(self) -> bool:
        """Do the tasks have the same names in the same order at every seed?"""
        return len({tuple(task["name"] for task in record.tasks) for record in self.records}) == 1

    @property
    def tasks(self) -> list[str]:
        """Their names; only their numbers if these depend on the seed."""
        tasks = self.records[0].tasks
        return [printable(task["name"]) if self.same_tasks else f"task {k + 1}" for k, task in enumerate(tasks)]

    def reference(self, method: str, seed: int) -> Record | None:
        found = (r for r in self.records if r.spec["method"] == method and r.spec["seed"] == seed)
        return next(found, None)


def option_text(value: object) -> str:
    """An option's value as a user would write it: 300,300 or 0.05 or true."""
    if isinstance(value, list | tuple):
        return ",".join(map(option_text, value))
    text = printable(value)
    return text.lower() if isinstance(value, bool) else text.removesuffix(".0")


def label(record: Record) -> str:
    """The method and those of its options that differ from their defaults: hat (c=1.5)."""
    method, options = record.spec["method"], record.spec["method_options"]
    known = parameters(METHODS[method]) if method in METHODS else {}
    defaults = {name: clean(parameter.default) for name, parameter in known.items()}
    changed = [f"{k}={option_text(v)}" for k, v in sorted(options.items()) if k not in defaults or v != defaults[k]]
    return printable(method) + (f" ({printable(', '.join(changed))})" if changed else "")


def settings(records: Iterable[Record]) -> list[Setting]:
    """The records in groups that can be compared: all but seed, method and its options is the same."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(json.dumps(_common(record), sort_keys=True), []).append(record)
    keys = sorted(groups, key=lambda key: (groups[key][0].spec["benchmark"], key))
    specs = [_common(groups[key][0]) for key in keys]
    return [Setting(_title(spec, specs), spec, _by_label(groups[key])) for key, spec in zip(keys, specs, strict=True)]


def _common(record: Record) -> dict[str, Any]:
    own = {key: value for key, value in record.spec.items() if key not in ("seed", "method", "method_options")}
    return {**own, TASKS: len(record.tasks)}


def _title(spec: dict[str, Any], others: list[dict[str, Any]]) -> str:
    """The benchmark, and the fewest options that tell its settings from each other."""
    same = [_flat(other) for other in others if other["benchmark"] == spec["benchmark"]]

    def kinds(names: Iterable[str]) -> int:
        return len({tuple(option_text(other.get(name)) for name in names) for other in same})

    differ = [name for name in dict.fromkeys(chain.from_iterable(same)) if kinds([name]) > 1]
    subsets = chain.from_iterable(combinations(differ, size) for size in range(len(differ) + 1))
    chosen, own = next(names for names in subsets if kinds(names) == kinds(differ)), _flat(spec)
    text = ", ".join(f"{name}={option_text(own[name])}" for name in chosen if name in own)
    return printable(spec["benchmark"]) + (f" ({text})" if text else "")


def _flat(spec: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in spec.items():
        result.update(value if isinstance(value, dict) else {key: value})
    return result


def _by_label(records: list[Record]) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda r: (label(r), r.spec["seed"])):
        group = groups.setdefault(label(record), [])
        if not group or group[-1].spec["seed"] != record.spec["seed"]:
            group.append(record)
        elif _outcome(group[-1]) != _outcome(record):
            raise ValueError(f"{group[-1].name} and {record.name} are the same run with different results; keep one of them")
    return groups


def _outcome(record: Record) -> Record:
    return replace(record, name="", spec={}, seconds={}, versions={})


def ratios(setting: Setting, record: Record) -> metrics.Matrix | None:
    """rho<=t for every t; None unless the setting has both references at the record's seed."""
    joint, random = (setting.reference(name, record.spec["seed"]) for name in REFERENCES)
    if joint is None or random is None:
        return None
    return metrics.forgetting_ratios(record.accuracy, joint.accuracy, random.accuracy)


def missing(setting: Setting) -> dict[str, list[int]]:
    """The references that the forgetting ratio lacks, and for which seeds."""
    absent = {name: [s for s in setting.seeds if setting.reference(name, s) is None] for name in REFERENCES}
    return {name: seeds for name, seeds in absent.items() if seeds}


def ranking(setting: Setting) -> list[Row]:
    """A row per method, the best average accuracy first; the references come last."""
    rows = [_row(setting, name, records) for name, records in setting.methods.items()]
    return sorted(rows, key=lambda row: (row.reference, -(row.measures["accuracy"] or Spread(-1, None, 0)).mean, row.label))


def _row(setting: Setting, name: str, records: list[Record]) -> Row:
    columns: dict[str, list[float]] = {measure.key: [] for measure in MEASURES}
    for record in records:
        ratio = ratios(setting, record)
        values = {
            **record.summary,
            "forgetting_ratio": math.nan if ratio is None else float(ratio[-1]),
            "parameters": float(record.parameters),
            "seconds": float(record.seconds.get("total", math.nan)),
        }
        for key, column in columns.items():
            column.append(values[key])
    seeds = tuple(record.spec["seed"] for record in records)
    measures = {key: spread(column) for key, column in columns.items()}
    return Row(name, seeds, records[0].spec["method"] in REFERENCES, measures)


def terminal(setting: Setting) -> Table:
    """The ranking for the terminal, in fewer columns."""
    table = Table(title=Text(f"{setting.title}: mean ± standard deviation over n seeds"), title_justify="left",
                  box=box.SIMPLE, padding=(0, 1, 0, 0))  # fmt: skip
    table.add_column("method", overflow="fold", min_width=11)
    table.add_column("n", justify="right")
    shown = [measure for measure in MEASURES if measure.short]
    for measure in shown:
        table.add_column(measure.short, justify="right", no_wrap=True)
    rows = ranking(setting)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        cells = [(m, row.measures[m.key]) for m in shown]
        texts = [
            f"{number(m, s.mean)} {'' if m.unit == 's' else deviation(m, s)}".strip() if s else MISSING for m, s in cells
        ]
        last_ranked = following is not None and following.reference and not row.reference
        style = "dim" if row.reference else None
        table.add_row(Text(row.label), str(len(row.seeds)), *texts, style=style, end_section=last_ranked)
    return table


def csv_text(settings: Iterable[Setting]) -> str:
    """Every number of the rankings in full; accuracies are fractions of 1, and a missing value is an empty cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns = [name for m in MEASURES for name in (m.key, f"{m.key}_std")]
    writer.writerow(["setting", "method", "reference", "seeds", *columns, "forgetting_ratio_seeds"])
    for setting in settings:
        for row in ranking(setting):
            spreads = [row.measures[m.key] for m in MEASURES]
            values = [value for s in spreads for value in ((s.mean, s.std) if s else (None, None))]
            ratio = row.measures["forgetting_ratio"]
            reference = "yes" if row.reference else "no"
            names = (_cell(setting.title), _cell(row.label))
            writer.writerow([*names, reference, len(row.seeds), *values, ratio.seeds if ratio else 0])
    return out.getvalue()


def _cell(name: str) -> str:
    """A name that no spreadsheet takes for a formula."""
    return f"'{name}" if name.startswith(("=", "+", "-", "@")) else name
