"""The leaderboard of a setting: a row per method with its cells, its seeds, its command and its records."""

from typing import Any

from hatrack.experiments.record import Record
from hatrack.experiments.statistics import leaders
from hatrack.reporting.looks import Look
from hatrack.reporting.measures import MISSING, MeanStd, Measure, format_number, format_std, heading, shown_measures
from hatrack.reporting.tables import Row, Setting, accuracies
from hatrack.reporting.words import count_text, run_command

FIRST = ("accuracy", "forgetting", "parameters")  # the measures that are shown at first, beside method and seeds
OF_A_SEED = ("accuracy", "learning", "forgetting")


def board(setting: Setting, looks: dict[str, Look], link: str | None) -> dict[str, Any]:
    """Return the leaderboard as plain values.

    Args:
        setting: one of `settings(records)`.
        looks: how every method is drawn.
        link: what stands before the file names of records in links; None for no links.
    """
    rows = setting.rows
    measures = shown_measures((row.measures for row in rows), setting.score)
    shown = [m for m in measures if m.part == "ranking" or any(row.measures.get(m.key) for row in rows)]
    best = leaders(accuracies(setting))
    columns = [
        {"key": m.key, "title": m.title, "unit": heading(m).removeprefix(m.title), "kind": _kind(m), "lower": m.key in LOWER}
        for m in shown
    ]
    return {"columns": columns, "rows": [_row(setting, row, shown, best, looks[row.label], link) for row in rows]}


LOWER = ("forgetting", "forgetting_mirzadeh", "loss_forgetting", "intransigence", "parameters", "seconds")  # less is better


def _kind(measure: Measure) -> str:
    """Return whether a column is shown at first, with all measures, or with the costs."""
    return "first" if measure.key in FIRST else "costs" if measure.part == "costs" else "measures"


def _row(setting: Setting, row: Row, shown: list[Measure], best: list[str], look: Look, link: str | None) -> dict[str, Any]:
    records = setting.methods[row.label]
    name, _, options = row.label.partition(" ")
    place = "" if row.label not in best else "ahead" if len(best) == 1 else "tied"
    return {
        "label": row.label,
        "name": name,
        "options": options,
        "reference": row.reference,
        "place": place,
        "look": look._asdict(),
        "seeds": len(row.seeds),
        "cells": [cell(measure, row.measures.get(measure.key), len(row.seeds)) for measure in shown],
        "command": run_command(records[0].spec, list(row.seeds)),
        "runs": [_run(record, setting.summaries[record.name], shown, link) for record in records],
    }


def cell(measure: Measure, value: MeanStd | None, seeds: int) -> dict[str, Any]:
    """Return a cell: its value, its text, and the deviation and how many seeds have it as small texts."""
    if value is None:
        return {"value": None, "text": MISSING, "small": []}
    some = f"of {count_text(value.seeds, 'seed')}" if value.seeds < seeds else ""
    small = [text for text in (format_std(measure, value), some) if text]
    return {"value": value.mean, "text": format_number(measure, value.mean), "small": small}


def _run(record: Record, values: dict[str, float], shown: list[Measure], link: str | None) -> dict[str, Any]:
    """Return what is said about one run: its seed, its main measures, its time, where it ran, and its file."""
    texts = [
        format_number(m, values[m.key]) if values[m.key] == values[m.key] else MISSING for m in shown if m.key in OF_A_SEED
    ]
    seconds = record.seconds.total
    return {
        "seed": record.spec.seed,
        "values": [*texts, MISSING if seconds is None else f"{seconds:,.1f} s"],
        "where": str(record.versions.get("device", "")),
        "name": record.name,
        "href": None if link is None else f"{link}{record.name}.json",
    }
