"""Measuring the flatness of runs and showing it. Imported when `hatrack flatness` begins: it needs torch."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hatrack.cli.execute import available
from hatrack.cli.group import imported_when_called
from hatrack.experiments.flatness import check_models, flatness_folder, measure_run, write_flatness
from hatrack.experiments.progress import Display
from hatrack.experiments.record import Record
from hatrack.files.atomic import writable, write
from hatrack.inspection.flatness import CORRELATIONS, Flatness, correlations
from hatrack.reporting.tables import label, settings
from hatrack.text import say, visible

flatness_png = imported_when_called("hatrack.reporting.flatness:flatness_png")  # it needs matplotlib
COLUMNS = ("eigen-\nvalue", "moved", "loss", "forget-\nting\nby next", "second\norder", "bound", "forget-\nting\nat end")


def flatness(
    records: Sequence[Path],
    *,
    images: int,
    eigenvalues: int,
    points: int,
    names: str,
    figure: Path | None,
    own: Sequence[str],
    device: str,
) -> None:
    """Measure the flatness of runs, write it beside their records, print tables and draw a figure.

    Args:
        records: the files of the records.
        images: training images per task; 0: all.
        eigenvalues: how many of the largest eigenvalues of every Hessian.
        points: places on the line between the ends of two tasks.
        names: names of the runs that differ in more than the seed, with commas between them; "": by their methods.
        figure: the file of the figure; None: in the folder NAME.flatness of a single record, of several flatness.png
            beside the first.
        own: methods of the user's own, "module:class", that may be imported.
        device: "auto", "cpu" or "cuda".
    """
    read = [Record.load(path) for path in records]
    labels = _labels(read, names)
    for path, record in zip(records, read, strict=True):
        check_models(path, record)
    for file in (*records, figure or records[0]):
        writable(file.parent)  # an error now, not after the computation
    options = {"images": images, "eigenvalues": eigenvalues, "points": points}
    found: dict[str, list[Flatness]] = {}
    with Display(len(read)) as display:
        for number, (path, record) in enumerate(zip(records, read, strict=True)):
            show = partial(_show, display, number, f"{labels[number]} seed {record.spec.seed}")
            one = measure_run(path, record, available(device), show, own, **options)
            write_flatness(path, record, labels[number], options, one)
            found.setdefault(labels[number], []).append(one)
    methods = {label: record.spec.method for label, record in zip(labels, read, strict=True)}
    for name, runs in found.items():
        Console().print(_table(name, runs))
    everything = correlations([one for runs in found.values() for one in runs])
    for key, text in CORRELATIONS.items():
        say(f"{text}: {everything[key]}")
    alone = len(records) == 1
    figure = figure or (flatness_folder(records[0]) / "flatness.png" if alone else records[0].with_name("flatness.png"))
    write(figure, flatness_png(found, methods))
    say(f"the figure: {figure}; all numbers: flatness.json in {flatness_folder(records[0]) if alone else 'NAME.flatness'}")


def _labels(records: Sequence[Record], names: str) -> list[str]:
    """Return a label for every record: the same for runs that differ in their seed only."""
    groups = [
        (setting, name, {record.name for record in own})
        for setting in settings(records)
        for name, own in setting.methods.items()
    ]
    where = [next(k for k, (_, _, own) in enumerate(groups) if record.name in own) for record in records]
    order = list(dict.fromkeys(where))  # by the first record of each
    if names:
        given = names.split(",")
        if len(given) != len(order):
            raise ValueError(
                f"--names needs {len(order)} names, one for each run that is not only another seed, not {len(given)}"
            )
        if len(set(given)) < len(given):
            raise ValueError(f"--names {names}: every run needs a name of its own")
        return [given[order.index(k)] for k in where]
    plain = [label(record) for record in records]
    several = {text for text in plain if len({k for k, other in zip(where, plain, strict=True) if other == text}) > 1}
    return [f"{text} {order.index(k) + 1}" if text in several else text for k, text in zip(where, plain, strict=True)]


def _show(display: Display, number: int, what: str, share: float, text: str) -> None:
    display.show(number, share, f"{what}: {text}" if text else "")


def _table(name: str, runs: Sequence[Flatness]) -> Table:
    """Return the table of a run, or the means over its seeds: a row per task."""
    seeds = "" if len(runs) == 1 else f", mean over {len(runs)} seeds"
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), title=f"{visible(name)}{seeds}", title_justify="left")
    table.add_column("task", no_wrap=True, max_width=16)
    for title in COLUMNS:
        table.add_column(title, justify="right", no_wrap=True)
    same = all(one.tasks == runs[0].tasks for one in runs)  # angles and permutations have other names at other seeds
    for k, task in enumerate(runs[0].tasks):
        columns = zip(*(_values(one, k) for one in runs), strict=True)
        table.add_row(Text(visible(f"{k + 1} {task}" if same else str(k + 1))), *map(_mean, columns))
    return table


def _values(one: Flatness, task: int) -> list[float]:
    """Return the numbers of a task in the table; those that the first or the last task does not have are not numbers."""
    last = task == len(one.tasks) - 1
    second = math.nan if last else one.linear[task][1] + one.quadratic[task][1]
    return [
        one.top[task],
        one.moved[task - 1] if task else math.nan,
        one.losses[task][0],
        math.nan if last else one.forgetting[task][1],
        second,
        math.nan if last else one.bounds[task][1],
        math.nan if last else one.forgetting[task][-1],
    ]


def _mean(values: Sequence[float]) -> str:
    mean = sum(values) / len(values)
    return "—" if math.isnan(mean) else f"{mean:.3g}"
