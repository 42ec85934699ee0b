"""The data of a report: everything that its page shows, computed from records, as plain values that JSON can hold."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from hatrack.experiments.record import Record
from hatrack.experiments.records import TASK_COUNT
from hatrack.reporting.board import board, cell
from hatrack.reporting.budget import Budget, within_budget
from hatrack.reporting.by_task import ByTask, by_task
from hatrack.reporting.chart_data import chart_data
from hatrack.reporting.differences import cautions, differences
from hatrack.reporting.drawing import looks_of
from hatrack.reporting.facts import cards, certificates, headline, reuse_tables, setup
from hatrack.reporting.figures import mean_matrix, scale_of, shown_tasks, static_lines
from hatrack.reporting.looks import Look
from hatrack.reporting.measures import MISSING, measure_of, shown_measures
from hatrack.reporting.sweeps import responses, sweep_data
from hatrack.reporting.tables import Setting, flat_table, label, option_text, settings
from hatrack.reporting.words import caution, count_text, reference_commands, summary
from hatrack.text import printable

ReportData = dict[str, Any]
OF_A_RUN = (  # what may be known of a run that is not finished
    *("name", "status", "benchmark", "method", "seed", "host", "message", "task", "tasks", "task_name", "epoch", "epochs"),
    *("seconds", "left", "accuracy", "forgetting", "score", "curve", "capacity"),
)
DRAWN = 3  # settings with a figure for readers without script; further ones have tables


def collect(
    records: Sequence[Record],
    *,
    left_out: Iterable[Mapping[str, str]] = (),
    running: Iterable[Mapping[str, Any]] = (),
    budget: Budget | None = None,
    link: str | None = "",
) -> ReportData:
    """Return everything that the page of some records shows.

    Args:
        records: the finished runs; there may be none while runs go on.
        left_out: files that are no part of the report, each with its "name" and "why".
        running: runs that are not finished, a table for each: "name", and what else is known (docs/report.md).
        budget: leave out methods that cost more.
        link: what stands before the file names of records in links; None for no links.

    Returns:
        Plain values; `render_page` makes a page of them and `page_json` a text.

    Raises:
        ValueError: two records of the same run have different results, or the budget can't be applied.
    """
    found = [within_budget(one, budget) if budget else one for one in settings(records)]
    return collect_settings(found, left_out=left_out, running=running, link=link)


def collect_settings(
    found: Sequence[Setting],
    *,
    left_out: Iterable[Mapping[str, str]] = (),
    running: Iterable[Mapping[str, Any]] = (),
    link: str | None = "",
) -> ReportData:
    """Return the same as `collect`, from records that are grouped already. The setting with most methods comes first."""
    found = sorted(found, key=lambda setting: -len({label(record) for record in setting.records}))
    records = [record for setting in found for record in setting.records]
    looks = looks_of(list(found))
    sections = [_section(k, setting, looks, link) for k, setting in enumerate(found)]
    for setting in found:
        left_out = [*left_out, *({"name": "budget", "why": line} for line in setting.left_out)]
    data: ReportData = {
        "title": _title(found),
        "count": len(records),
        "sections": sections,
        "beside": _beside(found, looks) if len(found) > 1 else None,
        "sweeps": [sweep_data(response) for response in responses(records)],
        "glossary": _glossary(found),
        "left_out": [{key: printable(text) for key, text in line.items()} for line in left_out],
        "running": [{**dict.fromkeys(OF_A_RUN), **state} for state in running],
    }
    parts = [
        [section["title"], section["board"], section["cautions"]] for section in sections
    ]  # all runs with their results
    data["digest"] = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return data


def _title(found: Sequence[Setting]) -> str:
    if not found:
        return "runs that go on"
    return found[0].title if len(found) == 1 else f"{found[0].title} and {count_text(len(found) - 1, 'other')}"


def _section(index: int, setting: Setting, looks: dict[str, Look], link: str | None) -> dict[str, Any]:
    """Return what the page shows of one setting."""
    missing, chart = reference_commands(setting), chart_data(setting, looks)
    drawn = static_lines(setting, f"setting-{index + 1}", looks) if index < DRAWN else ""
    return {
        "id": f"setting-{index + 1}",
        "title": setting.title,
        "score": setting.score,
        "headline": headline(setting),
        "summary": summary(setting),
        "caution": caution(setting),
        "cautions": cautions(setting),
        "cards": cards(setting),
        "board": board(setting, looks, link),
        "missing": {"why": missing[0], "commands": missing[1]},
        "differences": differences(setting),
        "by_task": _by_task(setting),
        "matrices": _matrices(setting),
        "reuse": reuse_tables(setting),
        "certificates": certificates(setting),
        "setup": setup(setting),
        "tasks": _tasks(setting),
        "svg": drawn,
        "has_curves": any(any(method["curves"]) or method["watched"] for method in chart["methods"]),
        "chart": chart,
    }


def _by_task(setting: Setting) -> dict[str, Any]:
    """Return the forgetting ratio after every number of tasks, and the accuracy by position, as rows of cells."""
    rows, shown = by_task(setting), shown_tasks(len(setting.tasks))
    accuracy, ratio = measure_of(setting.score, "accuracy"), measure_of("accuracy", "forgetting_ratio")

    def line(row: ByTask, measure: Any, values: Sequence[Any]) -> list[dict[str, Any]]:
        return [cell(measure, values[k], row.seeds) for k in shown]

    ratios = [
        [row.label, line(row, ratio, row.forgetting_ratio)]
        for row in rows
        if not row.reference and any(row.forgetting_ratio)
    ]
    averages = [[row.label, line(row, accuracy, row.average_accuracy)] for row in rows]
    positions = []
    for row in rows:
        positions.append([row.label, "learned", line(row, accuracy, row.when_learned)])
        positions.append([row.label, "at the end", line(row, accuracy, row.at_the_end)])
    return {"numbers": [k + 1 for k in shown], "averages": averages, "ratios": ratios, "positions": positions}


def _matrices(setting: Setting) -> dict[str, Any]:
    """Return the mean accuracy matrix of every method as texts."""
    shown, scale = shown_tasks(len(setting.tasks)), scale_of(setting)
    tables = []
    for row in setting.rows:
        values = mean_matrix(setting.methods[row.label])
        texts = [[scale.text(values[t, i]) if values[t, i] == values[t, i] else MISSING for i in shown] for t in shown]
        tables.append({"label": row.label, "rows": texts})
    return {"names": [setting.tasks[k] for k in shown], "tables": tables, "of": len(setting.tasks)}


def _tasks(setting: Setting) -> dict[str, Any]:
    """Return the table of tasks, as they are at the first seed."""
    tasks = setting.records[0].tasks
    extra = any(task.score for task in tasks)
    rows = []
    for k in shown_tasks(len(tasks)):
        task = tasks[k]
        counts = [MISSING if n is None else str(n) for n in (task.classes, task.train, task.valid, task.test)]
        rows.append([str(k + 1), printable(task.name), *counts, *([printable(task.score or "accuracy")] if extra else [])])
    heads = ["#", "Task", "classes", "training", "validation", "test", *(["score"] if extra else [])]
    note = "" if setting.same_tasks else f"The tasks depend on the seed. These are the tasks of seed {setting.spec.seed}."
    return {"heads": heads, "rows": rows, "note": note}


def _beside(found: Sequence[Setting], looks: dict[str, Look]) -> dict[str, Any]:
    """Return all settings side by side: in which options they differ, and a row per setting and method."""
    flat = [{**flat_table(setting.common), "benchmark": setting.spec.benchmark} for setting in found]
    names = dict.fromkeys(chain.from_iterable(flat))
    differ = [name for name in names if len({option_text(table.get(name)) for table in flat}) > 1]
    rows = []
    for k, setting in enumerate(found):
        measures = [measure_of(setting.score, key) for key in ("accuracy", "forgetting")]
        for row in setting.rows:
            cells = [cell(m, row.measures.get(m.key), len(row.seeds)) for m in measures]
            look = looks[row.label]._asdict()
            rows.append(
                {
                    "setting": k,
                    "title": setting.title,
                    "label": row.label,
                    "look": look,
                    "seeds": len(row.seeds),
                    "cells": cells,
                }
            )
    tasks = {option_text(setting.common[TASK_COUNT]) for setting in found}
    return {"differ": [printable(name) for name in differ], "rows": rows, "same_length": len(tasks) == 1}


def _glossary(found: Sequence[Setting]) -> list[dict[str, str]]:
    scores = {setting.score for setting in found}
    score = scores.pop() if len(scores) == 1 else "accuracy"
    shown = shown_measures((row.measures for setting in found for row in setting.rows), score)
    return [{"key": m.key, "title": m.title, "meaning": m.meaning} for m in shown]
