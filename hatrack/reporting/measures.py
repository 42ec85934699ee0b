"""The measures of a ranking: names and explanations, and how their means and standard deviations are written."""
# ruff: noqa: RUF001  (the minus sign and the Greek rho are intended)

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

MISSING = "—"


class Measure(NamedTuple):
    """A column of the ranking.

    Attributes:
        key: its name in `Record.summary` and in table.csv.
        title: its name on the page.
        unit: how its values are written.
        meaning: an explanation for the glossary of the page.
        short: its name in the terminal; a measure without one is not shown there.
        optional: whether it is left out of tables in which no record has it.
    """

    key: str
    title: str
    unit: Literal["%", "ratio", "count", "s"]
    meaning: str
    short: str = ""
    optional: bool = False


MEASURES = (
    Measure(
        "accuracy",
        "Average accuracy",
        "%",
        "The share of test examples that are classified correctly after the last task was learned, averaged over all tasks.",
        short="accuracy %",
    ),
    Measure(
        "learning",
        "Learning accuracy",
        "%",
        "The accuracy on each task immediately after it was learned, averaged over all tasks.",
        short="learning %",
    ),
    Measure(
        "forgetting",
        "Forgetting",
        "ratio",
        "The highest accuracy on a task before the last task was learned, minus its accuracy at the end, averaged over all "
        "tasks except the last.",
        short="forgetting",
    ),
    Measure(
        "backward",
        "Backward transfer",
        "ratio",
        "The accuracy on a task at the end, minus its accuracy immediately after it was learned, averaged over all tasks "
        "except the last. Below zero, later tasks have made it worse; above zero, they have improved it.",
    ),
    Measure(
        "forward",
        "Forward transfer",
        "ratio",
        "The accuracy on a task just before it is learned, minus the accuracy of the untrained network on it, averaged over "
        "all tasks except the first: how much earlier tasks help with a new one.",
    ),
    Measure(
        "without_task_id",
        "Accuracy without task id",
        "%",
        "The average accuracy at the end if the method is not told which task an example belongs to: of the predictions of "
        "all tasks, the most confident one is taken.",
    ),
    Measure(
        "routed",
        "Accuracy without task id, router",
        "%",
        "The average accuracy at the end if a router finds out which task an example belongs to (the option --router).",
        optional=True,
    ),
    Measure(
        "forgetting_ratio",
        "Forgetting ratio ρ≤T",
        "ratio",
        "The accuracy relative to two references after all T tasks: 0 is as good as joint training on all tasks, −1 is as "
        "bad as guessing.",
        short="ρ≤T",
    ),
    Measure("parameters", "Parameters", "count", "How many parameters the method keeps, for all tasks together."),
    Measure(
        "seconds",
        "Seconds",
        "s",
        "The time of one run, with training and testing; it depends on the machine.",
        short="seconds",
    ),
)


def shown_measures(rows: Iterable[Mapping[str, Any]]) -> list[Measure]:
    """Return the columns of a table: all measures but the optional ones that no row has a value of."""
    found = list(rows)
    return [m for m in MEASURES if not m.optional or any(row.get(m.key) for row in found)]


class MeanStd(NamedTuple):
    """Mean and standard deviation over seeds."""

    mean: float
    std: float | None  # with n - 1 in the denominator; None for a single seed
    seeds: int  # how many seeds have a finite value


def mean_std(values: Sequence[float]) -> MeanStd | None:
    """Return the mean and the standard deviation of the finite values; None if there are none."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return None
    return MeanStd(float(np.mean(finite)), float(np.std(finite, ddof=1)) if len(finite) > 1 else None, len(finite))


def format_number(measure: Measure, value: float) -> str:
    """Return a value as text: percent with one decimal, ratios with three, with a minus sign, but never minus zero."""
    match measure.unit:
        case "%":
            text = f"{100 * value:z.1f}"
        case "ratio":
            text = f"{value:z.3f}"
        case "count":
            text = f"{value:,.0f}"
        case "s":
            text = f"{value:,.1f}"
    return text.replace("-", "−")


def format_std(measure: Measure, value: MeanStd) -> str:
    """Return the standard deviation as text, "± 0.4"; empty for a single seed, and for counts that are all equal."""
    if value.std is None or (measure.unit == "count" and not value.std):
        return ""
    return f"± {format_number(measure, value.std)}"


def spreadsheet_text(name: str) -> str:
    """Return a name that no spreadsheet takes for a formula."""
    return f"'{name}" if name.startswith(("=", "+", "-", "@")) else name
