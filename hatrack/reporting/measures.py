"""The measures of a ranking: names and explanations, and how their means and standard deviations are written."""
# ruff: noqa: RUF001  (the minus sign and the Greek rho are intended)

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from hatrack.text import is_percent

MISSING = "—"
OF_CLASSES = ("without_task_id", "routed")  # measures that only classes have


class Measure(NamedTuple):
    """A column of the ranking.

    Attributes:
        key: its name in `Record.summary` and in table.csv.
        title: its name on the page.
        unit: how its values are written.
        meaning: an explanation for the glossary of the page, with the formula.
        short: its name in the terminal; a measure without one is not shown there.
        part: the table of the page that shows it: the ranking or the costs.
        optional: whether it is left out of tables in which no record has it.
    """

    key: str
    title: str
    unit: Literal["%", "ratio", "count", "s", "MB", "GFLOP"]
    meaning: str
    short: str = ""
    optional: bool = False
    part: Literal["ranking", "costs"] = "ranking"


def _cost(key: str, title: str, unit: Literal["count", "s", "MB", "GFLOP"], meaning: str) -> Measure:
    """Return a measure of the table of costs."""
    return Measure(key, title, unit, meaning, part="costs")


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
        "The highest accuracy on a task from the moment it was learned until just before the last task, minus its accuracy "
        "at the end, averaged over all tasks except the last: mean over i < T of max over i ≤ t < T of a[t, i] − a[T, i], "
        "where a[t, i] is the accuracy on task i after task t. It is exactly 0 if nothing changes.",
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
        "all tasks except the first: how much earlier tasks help with a new one. It is empty if every task has a head of "
        "its own, because that head is untrained until then.",
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
    Measure(
        "intransigence",
        "Intransigence",
        "ratio",
        "The accuracy that independent, a network for each task, reaches on a task, minus the accuracy right after this "
        "method learned it, at the same seed, averaged over all tasks: mean over i of b[i, i] − a[i, i]. Above zero, the "
        "method learns new tasks less well. It needs records of independent.",
    ),
    Measure(
        "forgetting_mirzadeh",
        "Forgetting (Mirzadeh et al. 2020)",
        "ratio",
        "As forgetting, but the highest accuracy may be one from before the task was learned: mean over i < T of max over "
        "t < T of a[t, i] − a[T, i]. It is the formula of Mirzadeh et al. 2020, for comparisons with their numbers.",
    ),
    Measure(
        "loss_forgetting",
        "Forgetting of the loss",
        "ratio",
        "The loss on the training data of a task at the end, minus that right after it was learned, averaged over all tasks "
        "except the last: mean over i < T of L[T, i] − L[i, i] (Mirzadeh et al. 2020).",
    ),
    Measure("parameters", "Parameters", "count", "How many parameters the method keeps, for all tasks together."),
    Measure(
        "seconds",
        "Seconds",
        "s",
        "The time of one run, with training and testing; it depends on the machine.",
        short="seconds",
    ),
    _cost(
        "bytes",
        "Kept",
        "MB",
        "What the method keeps after the last task, in millions of bytes: all of the four kinds that follow.",
    ),
    _cost("bytes_weights", "Weights", "MB", "Parameters of the network and of the method."),
    _cost("bytes_buffers", "Buffers", "MB", "Other tensors, such as anchors, Fisher information and statistics of norms."),
    _cost("bytes_masks", "Masks", "MB", "Which units or weights belong to which task."),
    _cost("bytes_images", "Stored examples", "MB", "Examples of earlier tasks, with labels and logits that belong to them."),
    _cost(
        "peak_bytes",
        "Peak in training",
        "MB",
        "The most memory that a fit took. On a GPU it is measured, with data and activations; on a CPU it is the sum of "
        "what the method holds, the gradients and the state of the optimizer, without data and activations.",
    ),
    _cost("steps", "Steps", "count", "Training steps of all tasks."),
    _cost("examples", "Examples", "count", "Training examples in all steps, without those that a method replays."),
    _cost(
        "flops",
        "Operations",
        "GFLOP",
        "Floating-point operations of all training steps, in billions: matrix products, convolutions and attention, forward "
        "and backward, by torch's formulas. What a method computes between its fits is not counted.",
    ),
    _cost("joules", "Energy, J", "s", "What the GPU took during the run, where it tells, with all that ran on it."),
)


def measures_of(score: str) -> tuple[Measure, ...]:
    """Return all measures, with the name of the score that stands in place of the accuracy."""
    return MEASURES if score == "accuracy" else tuple(_of(score, measure) for measure in MEASURES)


def measure_of(score: str, key: str) -> Measure:
    """Return the measure with this key, see `measures_of`."""
    return next(measure for measure in measures_of(score) if measure.key == key)


def _of(score: str, measure: Measure) -> Measure:
    if measure.key in OF_CLASSES:
        return measure
    meaning = measure.meaning.replace("accuracy", score)
    if measure.key == "accuracy":
        meaning = f"The {score} on test data after the last task was learned, averaged over all tasks."
    named = measure._replace(title=measure.title.replace("accuracy", score), meaning=meaning)
    if is_percent(score) or measure.unit != "%":
        return named._replace(short=measure.short.replace("accuracy", score))
    return named._replace(short=measure.short.replace("accuracy", score).removesuffix(" %"), unit="ratio")


def shown_measures(rows: Iterable[Mapping[str, Any]], score: str = "accuracy") -> list[Measure]:
    """Return the columns of a table: all measures but the optional ones that no row has a value of."""
    found = list(rows)
    return [m for m in measures_of(score) if not m.optional or any(row.get(m.key) for row in found)]


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


def heading(measure: Measure) -> str:
    """Return the title of a column, with the unit of its numbers."""
    return f"{measure.title}, {measure.unit}" if measure.unit in ("%", "MB", "GFLOP") else measure.title


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
        case "MB":
            text = f"{value / 1e6:,.3f}"
        case "GFLOP":
            text = f"{value / 1e9:,.3f}"
    return text.replace("-", "−")


def format_std(measure: Measure, value: MeanStd) -> str:
    """Return the standard deviation as text, "± 0.4"; empty for a single seed, and for counts that are all equal."""
    if value.std is None or (measure.unit in ("count", "MB", "GFLOP") and not value.std):
        return ""
    return f"± {format_number(measure, value.std)}"


def spreadsheet_text(name: str) -> str:
    """Return a name that no spreadsheet takes for a formula."""
    return f"'{name}" if name.startswith(("=", "+", "-", "@")) else name
