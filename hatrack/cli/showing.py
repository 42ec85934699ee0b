"""Showing a record. Imported when `hatrack show` begins: the options of a method need torch."""

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hatrack.benchmarks import BENCHMARKS
from hatrack.experiments.extending import why_not
from hatrack.experiments.record import Record, clean
from hatrack.experiments.record_parts import TaskInfo
from hatrack.experiments.run_folder import task_model
from hatrack.experiments.spec import Run
from hatrack.experiments.tuning_protocols import caution_of
from hatrack.methods import METHODS
from hatrack.networks import NETWORKS
from hatrack.options import parameters
from hatrack.regime import Regime
from hatrack.registry import Registry
from hatrack.reporting.endings import capacity_text
from hatrack.reporting.measures import MISSING, format_number, heading, measures_of
from hatrack.reporting.tables import option_text
from hatrack.text import duration, is_percent, printable, say, visible

WIDTH, FIRST = 7, 26  # letters of a column of the matrix, and of its first column
TABLES: dict[str, Registry[Any]] = {"benchmark": BENCHMARKS, "network": NETWORKS, "method": METHODS}


def show(path: Path) -> None:
    """Print what a record holds.

    Args:
        path: the file of the record.
    """
    record = Record.load(path)
    console = Console()
    spec = record.spec
    say(f"{spec.method} on {spec.benchmark} ({len(record.tasks)} tasks) with {spec.network}, seed {spec.seed}")
    say(f"options: {', '.join(changed(record)) or 'all have their defaults'}")
    title, matrix = _matrix(record, max(3, (console.width - FIRST) // WIDTH))
    say(title)
    console.print(matrix)
    console.print(_measures(record))
    for line in (*_facts(record), *_files(path, record)):
        say(line)


def changed(record: Record) -> Iterator[str]:
    """Yield the options of a record that differ from their defaults, as the command line takes them."""
    spec = record.spec.written
    for kind, table in TABLES.items():
        known = parameters(table[spec[kind]]) if spec[kind] in table else {}
        defaults = {name: parameter.default for name, parameter in known.items()}
        yield from _changed(spec[f"{kind}_options"], defaults)
    yield from _changed(spec["regime"], {name: p.default for name, p in parameters(Regime).items()})
    yield from _changed(
        {name: spec[name] for name in parameters(Run) if name in spec},
        {name: p.default for name, p in parameters(Run).items()},
    )


def _changed(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        if name not in defaults or value != clean(defaults[name]):
            yield f"{name.replace('_', '-')} {option_text(value)}"


def _matrix(record: Record, most: int) -> tuple[str, Table]:
    """Return the matrix of accuracies and its title; of a wider one than `most` columns the diagonal and the last row.

    Tasks have the numbers that `hatrack inspect` and `--task` give them, from 0.
    """
    count = len(record.tasks)
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("task", no_wrap=True, overflow="ellipsis", max_width=FIRST)
    if count > most:
        table.add_column("learned", justify="right")
        table.add_column("end", justify="right")
        for k, task in enumerate(record.tasks):
            shares = _texts(task, [record.accuracy[k][k], record.accuracy[-1][k]])
            table.add_row(Text(visible(f"{k} {task.name}")), *shares)
        return f"{_score(record)}, when a task was learned and at the end", table
    for k in range(count):
        table.add_column(str(k), justify="right", min_width=5)
    table.add_row("before", *_row(record, record.before), style="dim")
    for k, task in enumerate(record.tasks):
        table.add_row(Text(visible(f"{k} {task.name}")), *_row(record, record.accuracy[k]))
    return f"{_score(record)}: a row per task learned, a column per task tested", table


def _score(record: Record) -> str:
    """Return what the matrix holds: the accuracy in percent, or the scores that tasks have in its place, by their names."""
    names = dict.fromkeys(task.score or "accuracy" for task in record.tasks)
    listed = " or ".join(f"{name} in %" if is_percent(name) else name for name in names)
    return f"{next(iter(names))} on test data in %" if [*names] == ["accuracy"] else f"score on test data ({listed})"


def _row(record: Record, values: Iterable[float | None]) -> list[str]:
    """Return a score per task as text."""
    return [text for task, value in zip(record.tasks, values, strict=True) for text in _texts(task, [value])]


def _texts(task: TaskInfo, values: Iterable[float | None]) -> list[str]:
    """Return scores of a task as text: percent with one decimal, others with three."""
    percent = is_percent(task.score)
    return [MISSING if v is None else f"{100 * v:.1f}" if percent else f"{v:.3f}" for v in values]


def _measures(record: Record) -> Table:
    """Return the measures and the costs that need no other record, those without a value left out."""
    values = {**record.summary, "parameters": float(record.parameters), "seconds": record.seconds.total or math.nan}
    values |= record.costs.summary if record.costs else {}
    table = Table("measure", "value", box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.columns[1].justify = "right"
    for measure in measures_of(record.score):
        if math.isfinite(value := values.get(measure.key, math.nan)):
            table.add_row(heading(measure), format_number(measure, value))
    return table


def _facts(record: Record) -> Iterator[str]:
    """Yield what else a record tells: warnings first, then where it comes from and how it was computed."""
    caution = caution_of(record.tuned, record.spec.seed)
    yield from (f"caution: {text}" for text in filter(None, (caution and caution.text, record.held, record.halvings)))
    if capacity := capacity_text([record]):
        yield f"capacity: {capacity}"
    if record.pretraining:
        yield f"pretrained on {record.spec.pretrain} for {record.pretraining.epochs} epochs"
    if record.tuned:
        yield f"options chosen by hatrack tune, protocol {printable(record.tuned.get('protocol', 'unknown'))}"
    if record.extended:
        yield f"extended from {record.extended['from']}, which had {record.extended['tasks']} tasks"
    if record.seconds.total:
        yield f"took {duration(record.seconds.total)}"
    yield f"versions: {', '.join(f'{name} {printable(value)}' for name, value in record.versions.items())}"


def _files(path: Path, record: Record) -> Iterator[str]:
    """Yield where the models of a run are, and the commands that go on from here."""
    quoted, model = shlex.quote(str(path)), path.with_suffix(".safetensors")
    each = [file for k in range(len(record.tasks)) if (file := task_model(path, k)).exists()]
    if model.exists():
        yield f"model: {model}"
    else:
        yield "model: not kept; hatrack run ... --keep-model keeps it"
    if each:
        yield f"models after single tasks: {len(each)}, {each[0].name} and so on"
    yield "from here:"
    if record.weights_used:
        yield f"  hatrack inspect {quoted}"
    if len(each) == len(record.tasks):
        yield f"  hatrack flatness {quoted}"
    if model.exists() and _has_more_tasks(record):
        yield f"  hatrack extend {quoted} --tasks {len(record.tasks) + 1}"
    if model.exists():
        yield f"  hatrack export {shlex.quote(str(model))} --task 0"
        if record.weights_used:
            yield f"  hatrack certify {shlex.quote(str(model))}"
    yield f"  hatrack run --from {quoted}"
    yield f"  hatrack report {shlex.quote(str(path.parent))}"


def _has_more_tasks(record: Record) -> bool:
    """Return whether the sequence of a run goes on behind its last task, and `hatrack extend` would go on with it."""
    options = record.spec.benchmark_options
    if why_not(record.spec, len(record.tasks) + 1):
        return False
    return bool(record.spec.first_tasks) or options.get("permutations") == "prefix" or bool(options.get("step"))
