"""What the charts of a page are drawn from: plain lists of a setting's records, short enough for a page."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hatrack.experiments.record import Record
from hatrack.reporting.by_task import ByTask, by_task
from hatrack.reporting.capacity import capacities
from hatrack.reporting.curves import mean_watched
from hatrack.reporting.facts import short_names
from hatrack.reporting.looks import Look
from hatrack.reporting.measures import MeanStd
from hatrack.reporting.references import counted_accuracy
from hatrack.reporting.tables import Row, Setting, changed_options, flat_table, option_text
from hatrack.text import is_percent, printable

DIGITS = 10_000  # accuracies are whole numbers of this part of 1: four digits are more than a picture shows
POINTS = 60_000  # of all learning curves of a setting
LAYERS = 40  # in the charts of capacity


def chart_data(setting: Setting, looks: dict[str, Look]) -> dict[str, Any]:
    """Return what the charts of a setting need, as plain values that JSON can hold.

    Args:
        setting: one of `settings(records)`.
        looks: how every method is drawn, by its label.
    """
    most = max(60, POINTS // max(1, len(setting.records)))
    ratios = {row.label: row for row in by_task(setting)}
    return {
        "title": setting.title,
        "common": {printable(name): option_text(value) for name, value in flat_table(setting.common).items()},
        "score": setting.score,
        "percent": is_percent(setting.score),
        "tasks": setting.tasks,
        "seeds": setting.seeds,
        "methods": [_method(setting, row, ratios[row.label], looks[row.label], most) for row in setting.rows],
    }


def _method(setting: Setting, row: Row, ratio: ByTask, look: Look, most: int) -> dict[str, Any]:
    records = setting.methods[row.label]
    return {
        "label": row.label,
        "name": short_names(setting)[row.label],
        "method": printable(records[0].spec.method),
        "options": {printable(name): text for name, text in changed_options(records[0]).items()},
        "reference": row.reference,
        "look": look._asdict(),
        "seeds": list(row.seeds),
        "point": {key: _pair(row.measures.get(key)) for key in ("accuracy", "forgetting", "parameters")},
        "matrices": [whole(counted_accuracy(record).ravel()) for record in records],
        "ratio": [None if value is None else whole([value.mean])[0] for value in ratio.forgetting_ratio],
        "curves": [_curves(record, most) for record in records],
        "watched": _watched(records),
        "capacity": _capacity(records),
    }


def _pair(value: MeanStd | None) -> list[float | None]:
    return [value.mean, value.std] if value else [None, None]


def whole(values: Iterable[float]) -> list[int | None]:
    """Return numbers as whole multiples of 1 / DIGITS; None for those that are not finite."""
    return [round(DIGITS * value) if math.isfinite(value) else None for value in map(float, values)]


def _curves(record: Record, most: int) -> list[list[Any]]:
    """Return for every fit its task, its first epoch in the run, the distance of the epochs that are kept, and values."""
    fits = [curve for curve in record.curves if curve.epochs]
    total = sum(len(curve.epochs) for curve in fits)
    step, start = max(1, math.ceil(total / most)), 0
    found: list[list[Any]] = []
    for curve in fits:
        values = [math.nan if p.valid_accuracy is None else p.valid_accuracy for p in curve.epochs[::step]]
        found.append([curve.task, start, step, whole(values)])
        start += len(curve.epochs)
    return found if any(value is not None for fit in found for value in fit[3]) else []


def _watched(records: Sequence[Record]) -> dict[str, Any] | None:
    """Return the accuracy on every task after each epoch, over seeds; None if no run measured it."""
    found = mean_watched(list(records))
    if found is None:
        return None
    (accuracy, starts), seed = found
    step = max(1, math.ceil(accuracy.size / POINTS))
    lines = [[task, start, whole(accuracy[::step, task])] for task, start in starts.items()]
    return {"lines": lines, "step": step, "seed": seed.removeprefix(", ")}


def _capacity(records: Sequence[Record]) -> dict[str, Any] | None:
    """Return the mean use of the weights of all layers and of each, and the reuse; None for a method without masks."""
    found = capacities(list(records))
    if not found:
        return None
    names = [layer.name for layer in found[0].layers]
    same = [one for one in found if [layer.name for layer in one.layers] == names]
    layers = [("all weights", [one.used for one in found], [one.own for one in found])]
    for k, layer in enumerate(found[0].layers[:LAYERS]):
        layers.append((printable(layer.title), [c.layers[k].used for c in same], [c.layers[k].own for c in same]))
    reuse = np.mean([one.reuse for one in found], axis=0)
    return {
        "layers": [
            {"name": name, "used": whole(np.mean(used, axis=0)), "own": whole(np.mean(own, axis=0))}
            for name, used, own in layers
        ],
        "reuse": [whole(row) for row in reuse],
    }
