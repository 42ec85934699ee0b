"""Showing what tasks use of a network. Imported when `hatrack inspect` begins: it needs torch."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hatrack.cli.group import imported_when_called
from hatrack.cli.trunks import load_model
from hatrack.experiments.record import Record
from hatrack.inspection.capacity import Capacity
from hatrack.inspection.measuring import capacity
from hatrack.methods.method import Method
from hatrack.text import SCARCE, say, visible

LISTED = 10  # tasks in a sentence
WIDTH, FIRST = 7, 38  # letters of a column of numbers, and of the first two columns together
draw_masks = imported_when_called("hatrack.reporting.masks:draw_masks")  # it needs matplotlib


def inspect(thing: Path, pictures: Path | None, trunk: str, method: str) -> None:
    """Print the capacity that a record holds, or that of a saved model.

    Args:
        thing: the file of a record or of a model.
        pictures: where to draw the masks of a model; None: nowhere.
        trunk: the place of a function that makes the model's trunk, "module:name"; "" if the file says it.
        method: the place of the class of the model's method, if it is the user's own.
    """
    model: Method | None = None
    if thing.suffix == ".json":
        record = Record.load(thing)
        kept = thing.with_suffix(".safetensors")
        model = load_model(kept, trunk, method) if pictures and kept.exists() else None
        found = Capacity.from_dict(record.weights_used) if record.weights_used else Capacity([])
    else:
        model = load_model(thing, trunk, method)
        found = capacity(model)
    if not found.layers:
        raise ValueError(f"{thing} has no masks to look at: hat, pmask and packnet have, in records from version 0.2 on")
    show(found, list(model.history) if model else None)
    if pictures and model is None:
        raise ValueError(f"pictures of masks need the model: hatrack run ... --keep-model keeps it beside {thing.name}")
    if pictures and model is not None:
        say(f"{draw_masks(model, pictures)} pictures in {pictures}")


def show(found: Capacity, numbers: Sequence[int] | None = None) -> None:
    """Print the tables and sentences of a capacity.

    Args:
        found: the capacity.
        numbers: the numbers of its tasks, as `hatrack export --task` takes them; None: 0, 1, 2 and so on.
    """
    numbers = range(len(found.tasks)) if numbers is None else numbers
    console = Console()
    last = list(range(len(found.tasks)))[-max(3, (console.width - FIRST) // WIDTH) :]
    if len(last) < len(found.tasks):
        say(f"the last {len(last)} of {len(found.tasks)} tasks are shown; a wider terminal shows more")
    shown = [numbers[t] for t in last]
    layers = _table("weights used after each task, in %", "layer", "weights", shown)
    for layer in found.layers:
        layers.add_row(Text(visible(layer.title)), f"{layer.weights:,}", *_percents(layer.used[t] for t in last))
    total = sum(layer.weights for layer in found.layers)
    layers.add_row("all", f"{total:,}", *_percents(found.used[t] for t in last), style="bold")
    if found.frozen and found.frozen != found.used:
        layers.add_row("all that are frozen", "", *_percents(found.frozen[t] for t in last))
    console.print(layers)
    reuse = _table("of what a task uses, the share that another uses as well, in %", "task", "uses", shown)
    for i in last:
        shares = _percents([found.own[i], *(found.reuse[i][j] for j in last)])
        reuse.add_row(Text(visible(f"{numbers[i]} {found.tasks[i]}")), *shares)
    console.print(reuse)
    for line in sentences(found, numbers):
        say(line)


def _table(title: str, first: str, second: str, tasks: Iterable[int]) -> Table:
    """Return a table with two columns and one for each of these numbers of tasks."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), title=title, title_justify="left")
    table.add_column(first, no_wrap=True, overflow="ellipsis", max_width=FIRST - 14)
    table.add_column(second, justify="right", no_wrap=True, min_width=10)
    for t in tasks:
        table.add_column(str(t), justify="right", no_wrap=True, min_width=5)
    return table


def _percents(shares: Iterable[float]) -> list[str]:
    return [f"{100 * share:.1f}" for share in shares]


def sentences(found: Capacity, numbers: Sequence[int] | None = None) -> list[str]:
    """Return what the tables come to, in words; `numbers` are those of the tasks, None: 0, 1, 2 and so on."""
    numbers = range(len(found.tasks)) if numbers is None else numbers
    total, (unused, one, *more) = sum(found.shared_by), found.shared_by
    everyone = more.pop() if more else 0
    parts = [f"{found.free:.1%} of the weights are free", f"{one / total:.1%} are used by one task"]
    if more:
        parts.append(f"{sum(more) / total:.1%} by some")
    if len(found.tasks) > 1:
        parts.append(f"{everyone / total:.1%} by all {len(found.tasks)}")
    if (between := unused / total - found.free) > 0.0005:
        parts.append(f"{between:.1%} are frozen between units of different tasks")
    count = range(len(found.tasks))
    built_on = [str(numbers[j]) for j in count if any(found.reuse[i][j] > 0 for i in count[j + 1 :])]
    listed = ", ".join(built_on[:LISTED]) + (f", ... ({len(built_on)} in all)" if len(built_on) > LISTED else "")
    reuse = f"later tasks reuse weights of {listed}" if built_on else "no task reuses weights of an earlier one"
    left = found.forecast
    if math.isinf(left):
        said = "the last task took no new weights, so that any number of tasks like it would fit"
    else:
        times = f"about {left:.0f} more tasks" if round(left) != 1 else "about one more task"
        said = f"{times} like the last would find over {SCARCE:.0%} of the weights free"
    return [", ".join(parts), *([reuse] if len(found.tasks) > 1 else []), said]
