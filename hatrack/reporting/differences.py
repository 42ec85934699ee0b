"""Differences between methods: which are more than noise, and what to doubt."""

import math
from itertools import accumulate
from typing import Any

from hatrack.experiments.record import Record
from hatrack.experiments.statistics import FEWEST, Difference, compare, leaders
from hatrack.reporting.measures import MISSING, Measure, format_number, measure_of
from hatrack.reporting.references import REFERENCES
from hatrack.reporting.tables import Setting, accuracies, tuning_cautions
from hatrack.reporting.words import count_text, join_names

MOST = 45  # pairs in the table: those of ten methods
CHANCE = 1.1  # times the accuracy of guessing: a method below it has learned nothing
TEXT = (
    "{title} at the end, compared at the seeds that two methods share{unit}. The first interval is "
    "Student's, with 95 %; the second resamples the seeds, which makes it too narrow if there are few. Both are for a pair "
    "by itself. The p-value is of the paired t-test, corrected after Holm for all pairs: under 0.05 the first is ahead, "
    "otherwise they are tied, which means that no difference is shown. As tied for the best count only those whose first "
    "interval of the difference to the best has 0 in it, and the one next to it."
)
TITLES = ("First", "Second", "Difference", "Student", "Resampled", "Ahead in", "p", "Verdict")


def differences(setting: Setting) -> dict[str, Any]:
    """Return the table of the differences between all pairs of methods, those with the best methods first.

    Returns:
        "text", "titles" and "rows", each a list of texts; there are no rows if there is one method only.
    """
    values = accuracies(setting)
    found, best = compare(values), set(leaders(values))
    found.sort(key=lambda d: (not best & {d.better, d.other}, -len(d.seeds), d.p, -d.mean))
    measure = measure_of(setting.score, "accuracy")
    text = TEXT.format(title=measure.title, unit=", in percentage points" if measure.unit == "%" else "")
    if len(found) > MOST:
        text += f" {MOST} of {len(found)} pairs are shown, those with the best methods first."
    rows = [_row(difference, measure) for difference in found[:MOST]]
    return {"text": text if rows else "There is one method only.", "titles": TITLES, "rows": rows}


def _row(difference: Difference, measure: Measure) -> list[str]:
    few = len(difference.seeds) < FEWEST
    return [
        difference.better,
        difference.other,
        _points(measure, difference.mean),
        _interval(measure, difference.interval),
        _interval(measure, difference.bootstrap),
        f"{difference.wins} of {len(difference.seeds)} seeds",
        MISSING if few else f"{difference.p:.3f}" if difference.p >= 0.001 else "< 0.001",
        difference.verdict,
    ]


def _points(measure: Measure, value: float) -> str:
    return format_number(measure, value) if math.isfinite(value) else MISSING


def _interval(measure: Measure, interval: tuple[float, float]) -> str:
    return MISSING if math.isnan(interval[0]) else " to ".join(_points(measure, value) for value in interval)


def cautions(setting: Setting) -> list[str]:
    """Return what to doubt: methods tuned too kindly, that did what plain SGD does, that learned nothing, or whose training
    loss grew."""
    plain = {r.spec.seed: r for r in setting.records if r.spec.method == "sgd" and not r.spec.method_options}
    found = tuning_cautions(setting) + _other_scores(setting)
    for name, records in setting.methods.items():
        if records[0].spec.method in REFERENCES:
            continue
        pairs = [(r, plain[r.spec.seed]) for r in records if r.spec.seed in plain and r.spec.method != "sgd"]
        if pairs and all(_same(one, two) for one, two in pairs):
            found.append(f"{name} gave exactly the accuracies of plain sgd: its own part had no effect.")
        if all(_at_chance(record) for record in records):
            found.append(f"{name} is no better than guessing, also right after a task was learned.")
        if grown := sum(map(_grew, records)):
            found.append(f"The training loss of {name} grew while a task was learned, in {count_text(grown, 'run')}.")
    return found


def _same(one: Record, two: Record) -> bool:
    return len(one.tasks) > 1 and one.accuracy == two.accuracy and one.loss == two.loss


def _other_scores(setting: Setting) -> list[str]:
    """Return a sentence if the tasks have different scores, whose mean says little."""
    scores = [f"{task.score or 'accuracy'} of {task.name!r}" for task in setting.records[0].tasks]
    return (
        [f"The score is the {join_names(scores)}: a mean of them is of numbers of different kinds."]
        if (setting.score == "score" and len({task.score for task in setting.records[0].tasks}) > 1)
        else []
    )


def _at_chance(record: Record) -> bool:
    if any(task.score for task in record.tasks):
        return False
    classes = [max(1, task.classes) for task in record.tasks]
    if record.spec.scenario == "class":  # a task is told apart from those before it
        classes = list(accumulate(classes))
    return record.summary["learning"] <= CHANCE * sum(1 / count for count in classes) / len(classes)


def _grew(record: Record) -> bool:
    """Return whether a training loss was larger in the last epoch than in the first, or no longer a number."""
    fits = [[point.loss for point in curve.epochs] for curve in record.curves if len(curve.epochs) > 1]
    return any(losses[0] is not None and (losses[-1] is None or losses[-1] > losses[0]) for losses in fits)
