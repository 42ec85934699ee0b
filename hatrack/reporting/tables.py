"""Records grouped into settings whose methods can be compared, and the ranking of the methods of each setting."""

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from hatrack.experiments import metrics
from hatrack.experiments.record import Record, clean
from hatrack.experiments.record_parts import Costs, Spec
from hatrack.experiments.records import common_spec, untuned
from hatrack.experiments.tuning_protocols import caution_of
from hatrack.methods import METHODS
from hatrack.options import parameters
from hatrack.reporting.measures import (
    MEASURES,
    MISSING,
    MeanStd,
    format_number,
    format_std,
    mean_std,
    measures_of,
    shown_measures,
    spreadsheet_text,
)
from hatrack.reporting.references import REFERENCES, counted_accuracy, counted_summary, reference_accuracy, reference_records
from hatrack.text import printable

MAY_DIFFER = (
    "name",
    "spec",
    "seconds",
    "versions",
    "valid_accuracy",
    "valid_loss",
    "costs",
    "tuned",
    "weights_used",
    "routed",
    "extended",
)  # between two records of one run


@dataclass(frozen=True)
class Row:
    """One method of a setting, with every measure over its seeds; None where no seed has a finite value."""

    label: str
    seeds: tuple[int, ...]
    reference: bool
    measures: dict[str, MeanStd | None]


@dataclass(frozen=True)
class Setting:
    """Records that differ only in method and seed, so that their methods can be compared.

    Attributes:
        title: the benchmark, with the options that tell this setting from others of the same benchmark.
        common: the keys of the spec that all records share, and the number of tasks.
        methods: the records of every method by its label, in order of their seeds.
        left_out: a line for every method that is outside the budget, see `budget.py`.
        outside: the records of these methods.
    """

    title: str
    common: Mapping[str, Any]
    methods: dict[str, list[Record]]
    left_out: tuple[str, ...] = ()
    outside: tuple[Record, ...] = ()

    @cached_property
    def records(self) -> list[Record]:
        """All records, method by method."""
        return [record for group in self.methods.values() for record in group]

    @cached_property
    def kept(self) -> dict[str, Any]:
        """What was computed about the setting once, for those who ask again."""
        return {}

    @cached_property
    def _places(self) -> dict[tuple[str, int], list[Record]]:
        """The records by method and seed."""
        found: dict[tuple[str, int], list[Record]] = {}
        for record in self.records:
            found.setdefault((record.spec.method, record.spec.seed), []).append(record)
        return found

    @cached_property
    def summaries(self) -> dict[str, dict[str, float]]:
        """The measures of every record by its name, see `counted_summary`."""
        return {record.name: counted_summary(record) for record in self.records}

    def at(self, method: str, seed: int) -> list[Record]:
        """Return the records of a method at a seed, those of all its variants."""
        return self._places.get((method, seed), [])

    @cached_property
    def rows(self) -> "list[Row]":
        """A row per method, the best average accuracy first; the references come last."""
        rows = [_row(self, name, records) for name, records in self.methods.items()]
        none = MeanStd(-math.inf, None, 0)
        return sorted(rows, key=lambda row: (row.reference, -(row.measures["accuracy"] or none).mean, row.label))

    @property
    def score(self) -> str:
        """The name of what stands in place of the accuracy, see `Record.score`."""
        return self.records[0].score

    @cached_property
    def spec(self) -> Spec:
        """The spec of the first record; the others differ from it in method, method options, seed and what was tuned."""
        return self.records[0].spec.replace(regime=self.common["regime"])

    @cached_property
    def seeds(self) -> list[int]:
        """The seeds of all records, in order."""
        return sorted({record.spec.seed for record in self.records})

    @cached_property
    def same_tasks(self) -> bool:
        """Whether the tasks have the same names in the same order at every seed."""
        return len({tuple(task.name for task in record.tasks) for record in self.records}) == 1

    @cached_property
    def tasks(self) -> list[str]:
        """The names of the tasks, or "task 1", "task 2", ... if the names depend on the seed."""
        tasks = self.records[0].tasks
        return [printable(task.name) if self.same_tasks else f"task {k + 1}" for k, task in enumerate(tasks)]

    def reference(self, method: str, seed: int) -> Record | None:
        """Return the record of a reference at a seed, if there is one; a complete one if there are several."""
        return next(iter(reference_records(self.at(method, seed), method, seed)), None)


def option_text(value: object) -> str:
    """Return an option's value as a user would write it: 300,300 or 0.05 or true."""
    if isinstance(value, list | tuple):
        return ",".join(map(option_text, value))
    text = printable(value)
    return text.lower() if isinstance(value, bool) else text.removesuffix(".0")


def label(record: Record) -> str:
    """Return the method and those of its options that differ from their defaults: hat (c=1.5).

    A record whose options were chosen in a way that is too kind says so: hat (c=1.5, tuned on the whole stream).
    """
    caution = caution_of(record.tuned, record.spec.seed)
    changed = [f"{name}={text}" for name, text in changed_options(record).items()]
    changed += [caution.short] if caution else []
    return printable(record.spec.method) + (f" ({printable(', '.join(changed))})" if changed else "")


def tuning_cautions(setting: Setting) -> list[str]:
    """Return a sentence for every method of a setting whose options were chosen in a way that is too kind."""
    firsts = {name: records[0] for name, records in setting.methods.items()}  # records of one label have one caution
    found = {name: caution_of(record.tuned, record.spec.seed) for name, record in firsts.items()}
    return [f"{name}: {caution.text}." for name, caution in found.items() if caution]


def changed_options(record: Record) -> dict[str, str]:
    """Return the options of a record's method that differ from their defaults, and those of its regime that were tuned."""
    method, options = record.spec.method, record.spec.method_options
    defaults = _method_defaults(method) if options and method in METHODS else {}
    own = {k: option_text(v) for k, v in sorted(options.items()) if k not in defaults or v != defaults[k]}
    return own | {k: option_text(record.spec.regime[k]) for k in untuned(record) if k in record.spec.regime}


@cache
def _method_defaults(method: str) -> dict[str, Any]:
    """Return the defaults of a method's options. It imports the method, and torch with it."""
    return {name: clean(parameter.default) for name, parameter in parameters(METHODS[method]).items()}


def settings(records: Iterable[Record]) -> list[Setting]:
    """Group records into settings.

    Args:
        records: any records.

    Returns:
        The settings, sorted by benchmark. In each, everything except the seed, the method and its options is the same.

    Raises:
        ValueError: two records of the same run have different results.
    """
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(json.dumps(common_spec(record), sort_keys=True), []).append(record)
    keys = sorted(groups, key=lambda key: (groups[key][0].spec.benchmark, key))
    common = [common_spec(groups[key][0]) for key in keys]
    titles = _titles(common)
    return [Setting(title, one, _by_label(groups[key])) for title, key, one in zip(titles, keys, common, strict=True)]


def _titles(common: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the title of every setting: the benchmark, and options that distinguish its settings from each other."""
    flat = [(one["benchmark"], flat_table(one)) for one in common]
    by_benchmark: dict[str, list[dict[str, Any]]] = {}
    for benchmark, options in flat:
        by_benchmark.setdefault(benchmark, []).append(options)
    chosen = {benchmark: _distinguishing(same) for benchmark, same in by_benchmark.items()}
    titles = []
    for benchmark, options in flat:
        text = ", ".join(f"{name}={option_text(options[name])}" for name in chosen[benchmark] if name in options)
        titles.append(printable(benchmark) + (f" ({text})" if text else ""))
    return titles


def _distinguishing(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return few options whose values together are as different as all options are.

    Options with many values come first, and one is taken if it divides a group of tables that still are the same: the time
    is linear in the tables times the options, while to find the fewest options would take time exponential in them.
    """
    names = list(dict.fromkeys(chain.from_iterable(tables)))
    texts = {name: [option_text(table.get(name)) for table in tables] for name in names}
    groups, taken = [0] * len(tables), set()
    for name in sorted(names, key=lambda name: -len(set(texts[name]))):
        numbers: dict[tuple[int, str], int] = {}
        finer = [numbers.setdefault(pair, len(numbers)) for pair in zip(groups, texts[name], strict=True)]
        if len(numbers) > max(groups) + 1:
            groups = finer
            taken.add(name)
    return [name for name in names if name in taken]


def flat_table(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table of tables as one table."""
    result: dict[str, Any] = {}
    for key, value in table.items():
        result.update(value if isinstance(value, dict) else {key: value})
    return result


def _by_label(records: list[Record]) -> dict[str, list[Record]]:
    """Return the records of every method, one per seed."""
    groups: dict[str, list[Record]] = {}
    named = [(label(record), record) for record in records]
    for name, record in sorted(named, key=lambda p: (p[0], p[1].spec.seed, not p[1].spec.watch_tasks, not p[1].routed)):
        group = groups.setdefault(name, [])
        if not group or group[-1].spec.seed != record.spec.seed:
            group.append(record)
        elif _results(group[-1]) != _results(record):
            raise ValueError(f"{group[-1].name} and {record.name} are the same run with different results; keep one of them")
    return groups


def _results(record: Record) -> dict[str, Any]:
    curves = [replace(curve, watched=[]) for curve in record.curves]  # one may have watched its tasks, the other not
    return {key: value for key, value in vars(record).items() if key not in MAY_DIFFER} | {"curves": curves}


def ratios(setting: Setting, record: Record) -> metrics.Matrix | None:
    """Return the forgetting ratio after every number of tasks, nan where no joint record of the seed was trained.

    It is None unless both references have a record at the same seed.
    """
    seed = record.spec.seed
    joint, random = (reference_accuracy(setting.at(name, seed), name, seed) for name in REFERENCES)
    if joint is None or random is None:
        return None
    return metrics.forgetting_ratios(counted_accuracy(record), joint, random, growing=record.spec.scenario == "class")


def intransigence(setting: Setting, record: Record) -> float:
    """Return how much better `independent` learned the tasks at the same seed; nan without a record of it."""
    records = [*setting.at("independent", record.spec.seed), *setting.outside]
    independent = reference_accuracy(records, "independent", record.spec.seed)
    return math.nan if independent is None else metrics.intransigence(counted_accuracy(record), independent)


def accuracies(setting: Setting) -> dict[str, dict[int, float]]:
    """Return the average accuracy at the end of every method that is ranked, by seed, in the order of the ranking."""
    ranked = [row.label for row in ranking(setting) if not row.reference]
    values = setting.summaries
    return {name: {r.spec.seed: values[r.name]["accuracy"] for r in setting.methods[name]} for name in ranked}


def missing_references(setting: Setting) -> dict[str, list[int]]:
    """Return the references that the forgetting ratio still needs, each with the seeds that have no record."""
    absent = {name: [s for s in setting.seeds if setting.reference(name, s) is None] for name in REFERENCES}
    return {name: seeds for name, seeds in absent.items() if seeds}


def ranking(setting: Setting) -> list[Row]:
    """Return a row per method, the best average accuracy first; the references come last."""
    return list(setting.rows)


def _row(setting: Setting, name: str, records: list[Record]) -> Row:
    columns: dict[str, list[float]] = {measure.key: [] for measure in MEASURES}
    for record in records:
        ratio = ratios(setting, record)
        values = {
            **setting.summaries[record.name],
            "forgetting_ratio": math.nan if ratio is None else float(ratio[-1]),
            "intransigence": intransigence(setting, record),
            **(record.costs or Costs()).summary,
            "parameters": float(record.parameters),
            "seconds": math.nan if record.seconds.total is None else float(record.seconds.total),
        }
        for key, column in columns.items():
            column.append(values.get(key, math.nan))
    seeds = tuple(record.spec.seed for record in records)
    found = {m.key: mean_std(columns[m.key]) for m in MEASURES}
    measures = {m.key: found[m.key] for m in MEASURES if found[m.key] or not m.optional}
    return Row(name, seeds, records[0].spec.method in REFERENCES, measures)


def terminal(setting: Setting) -> Table:
    """Return the ranking as a table for the terminal, with fewer columns than the page has.

    Args:
        setting: one of `settings(records)`.

    Returns:
        A table that `rich` prints.
    """
    table = Table(title=Text(f"{setting.title}: mean ± standard deviation over n seeds"), title_justify="left",
                  box=box.SIMPLE, padding=(0, 1, 0, 0))  # fmt: skip
    table.add_column("method", overflow="fold", min_width=11)
    table.add_column("n", justify="right")
    shown = [measure for measure in measures_of(setting.score) if measure.short]
    for measure in shown:
        table.add_column(measure.short, justify="right", no_wrap=True)
    rows = ranking(setting)
    if notes := tuning_cautions(setting):
        table.caption, table.caption_justify = Text(f"caution: {' '.join(notes)}"), "left"
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        cells = [(m, row.measures[m.key]) for m in shown]
        texts = [
            f"{format_number(m, s.mean)} {'' if m.unit == 's' else format_std(m, s)}".strip() if s else MISSING
            for m, s in cells
        ]
        last_ranked = following is not None and following.reference and not row.reference
        style = "dim" if row.reference else None
        table.add_row(Text(row.label), str(len(row.seeds)), *texts, style=style, end_section=last_ranked)
    return table


def csv_text(settings: Iterable[Setting]) -> str:
    """Return the rankings as CSV with all digits; accuracies are fractions of 1, and a missing value is an empty cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    settings = list(settings)
    measures = shown_measures(row.measures for setting in settings for row in ranking(setting))
    columns = [name for m in measures for name in (m.key, f"{m.key}_std")]
    writer.writerow(["setting", "method", "reference", "seeds", *columns, "forgetting_ratio_seeds"])
    for setting in settings:
        for row in ranking(setting):
            cells = [row.measures.get(m.key) for m in measures]
            values = [value for s in cells for value in ((s.mean, s.std) if s else (None, None))]
            ratio = row.measures["forgetting_ratio"]
            reference = "yes" if row.reference else "no"
            names = (spreadsheet_text(setting.title), spreadsheet_text(row.label))
            writer.writerow([*names, reference, len(row.seeds), *values, ratio.seeds if ratio else 0])
    return out.getvalue()
