"""Comparable budgets: methods that cost more than so many times what a base method costs are left out of a ranking."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from hatrack.methods import METHODS
from hatrack.options import choose, shown
from hatrack.reporting.measures import MEASURES
from hatrack.reporting.tables import Row, Setting, ranking

COSTS = {m.key: m.key for m in MEASURES if m.part == "costs" or m.key in ("parameters", "seconds")}


class Budget(NamedTuple):
    """Limits of costs.

    Attributes:
        limits: how many times the base's cost is allowed, by the name of the cost.
        base: the method whose costs are the measure.
    """

    limits: Mapping[str, float]
    base: str = "sgd"


def limits_of(text: str | None, base: str) -> Budget | None:
    """Return the budget of a text, see `parse_budget`; None without one. The name of the base is checked in both cases."""
    if ":" not in base:  # a method of the user's own
        METHODS.about(base)
    if not text and base != Budget._field_defaults["base"]:
        raise ValueError(f"budget_of is {base!r}, but there is no budget, such as bytes=1.5x")
    return parse_budget(text, base) if text else None


def parse_budget(text: str, base: str = "sgd") -> Budget:
    """Return the budget that a text such as "bytes=1.5x,steps=2x" stands for.

    Args:
        text: names of costs with their limits, in multiples of what the base costs.
        base: the method whose costs are the measure.

    Raises:
        ValueError: a cost is not known, or a limit is not a number from 1.
    """
    limits = {}
    for part in text.split(","):
        name, _, limit = part.partition("=")
        key = choose("cost", name.strip(), COSTS)
        try:
            limits[key] = float(limit.strip().removesuffix("x"))
        except ValueError:
            limits[key] = math.nan
        if not 1 <= limits[key] < math.inf:
            raise ValueError(f"the limit of {key} must be a number from 1, such as {key}=1.5x, not {shown(limit)}")
    return Budget(limits, base)


def within_budget(setting: Setting, budget: Budget) -> Setting:
    """Return a setting without the methods that cost more than the budget allows. The references stay.

    Args:
        setting: one of `settings(records)`.
        budget: the limits.

    Returns:
        The setting; its `left_out` has a line for every method that is left out.

    Raises:
        ValueError: there is no record of the base, or its records do not have one of the costs.
    """
    rows = ranking(setting)
    base = _base(setting, rows, budget)
    reasons = {row.label: why for row in rows if not row.reference and (why := _reason(row, base, budget))}
    lines = tuple(f"{label} is left out: {why}" for label, why in reasons.items())
    kept = {label: group for label, group in setting.methods.items() if label not in reasons}
    outside = tuple(record for label in reasons for record in setting.methods[label])
    return replace(setting, methods=kept, left_out=lines, outside=outside)


def _base(setting: Setting, rows: list[Row], budget: Budget) -> Row:
    """Return the row of the base: of the method with its default options if it is there, else of its first variant."""
    found = [row for row in rows if setting.methods[row.label][0].spec.method == budget.base]
    if not found:
        raise ValueError(f"a budget is measured by {budget.base}, which has no record in {setting.title}")
    row = min(found, key=lambda row: (row.label != budget.base, row.label))
    for key in budget.limits:
        if row.measures[key] is None:
            raise ValueError(f"the records of {budget.base} in {setting.title} do not have {key}: run them again")
    return row


def _reason(row: Row, base: Row, budget: Budget) -> str:
    """Return why a method is outside the budget; empty if it is not."""
    for key, limit in budget.limits.items():
        own, allowed = row.measures[key], base.measures[key]
        if own is None:
            return f"its records do not have {key}"
        if allowed is not None and own.mean > limit * allowed.mean:
            times = own.mean / allowed.mean if allowed.mean else math.inf
            return f"its {key} is {times:.3g} times that of {base.label}, more than {limit:g}"
    return ""
