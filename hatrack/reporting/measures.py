"""The measures of a ranking: what each is called, what it means, and how its mean and spread over seeds are written."""
# ruff: noqa: RUF001  (a real minus sign and the Greek rho are meant)

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

MISSING = "—"


class Measure(NamedTuple):
    """A column of the ranking, and how to explain it to a student."""

    key: str
    title: str
    unit: Literal["%", "ratio", "count", "s"]
    meaning: str
    short: str = ""  # its title in the terminal; those without one are left out there


MEASURES = (
    Measure(
        "accuracy",
        "Average accuracy",
        "%",
        "The share of test examples answered rightly after the last task was learned, averaged over all tasks.",
        short="accuracy %",
    ),
    Measure(
        "learning",
        "Learning accuracy",
        "%",
        "The accuracy on each task right after it was learned, averaged: how well the new is taken in.",
        short="learning %",
    ),
    Measure(
        "forgetting",
        "Forgetting",
        "ratio",
        "How far the accuracy on a task has fallen from its best to the end, averaged over all tasks but the last.",
        short="forgetting",
    ),
    Measure(
        "backward",
        "Backward transfer",
        "ratio",
        "How the accuracy on a task has changed since it was learned: below zero, later tasks have harmed it; above zero, "
        "they have helped.",
    ),
    Measure(
        "forward",
        "Forward transfer",
        "ratio",
        "How much better than by the untrained network a task is answered just before its turn: what the tasks before it "
        "have done for it.",
    ),
    Measure(
        "without_task_id",
        "Accuracy without task id",
        "%",
        "The average accuracy at the end when nobody says which task an example belongs to: the most confident answer of "
        "all tasks counts.",
    ),
    Measure(
        "forgetting_ratio",
        "Forgetting ratio ρ≤T",
        "ratio",
        "Where the accuracy lies between two references after all T tasks: 0 is as good as joint training on all of them, "
        "−1 as bad as guessing.",
        short="ρ≤T",
    ),
    Measure("parameters", "Parameters", "count", "How many weights the method keeps, those of all tasks together."),
    Measure(
        "seconds",
        "Seconds",
        "s",
        "The time that one run took, training and testing; it depends on the machine.",
        short="seconds",
    ),
)


class Spread(NamedTuple):
    """Mean and standard deviation over seeds."""

    mean: float
    std: float | None  # of the sample (n - 1); None for a single seed
    seeds: int  # that have the value


def spread(values: Sequence[float]) -> Spread | None:
    """Over those of the values that are finite; None without any."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return None
    return Spread(float(np.mean(finite)), float(np.std(finite, ddof=1)) if len(finite) > 1 else None, len(finite))


def number(measure: Measure, value: float) -> str:
    """A value as people read it: percent with one decimal, ratios with three, a real minus sign, never minus zero."""
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


def deviation(measure: Measure, over: Spread) -> str:
    """The part behind the mean, "± 0.4"; empty with one seed, and for counts that are all the same."""
    return "" if over.std is None or (measure.unit == "count" and not over.std) else f"± {number(measure, over.std)}"
