"""Whether two records of one run have the same results, and if not, in what they differ."""

from typing import Any

from hatrack.experiments.record import Record

RESULTS = (
    "tasks", "parameters", "before", "accuracy", "loss", "train_loss", "without_task_id", "valid_accuracy", "valid_loss",
    "curves", "usage", "costs", "routed",
)  # fmt: skip


def differences(old: Record, new: Record) -> list[str]:
    """Return a line for every result in which two records differ, with the largest difference of its numbers.

    Validation matrices and costs are compared if both records have them: those of older versions have none. Memory and
    energy depend on the machine and are not compared, nor are training losses of tasks before they were learned, which only
    older versions have.
    """
    one, two = _comparable(old.to_dict()), _comparable(new.to_dict())
    lines = []
    for name in RESULTS:
        missing = name.startswith(("valid_", "costs")) and not (one.get(name) and two.get(name))
        if not missing and one.get(name) != two.get(name):
            pairs = list(zip(_numbers(one.get(name)), _numbers(two.get(name)), strict=False))
            largest = max((abs(a - b) for a, b in pairs), default=0.0)
            lines.append(f"{name}: not the same" + (f", by {largest:.3g} at most" if largest else ""))
    return lines


def _comparable(data: dict[str, Any]) -> dict[str, Any]:
    """Return a record's table without the costs that depend on the machine, and what only older versions have."""
    costs = {name: value for name, value in data.get("costs", {}).items() if name not in ("peak_bytes", "joules")}
    learned = [row[: number + 1] for number, row in enumerate(data["train_loss"])]
    return {**data, "costs": costs, "train_loss": learned}


def _numbers(value: Any) -> list[float]:
    """Return all numbers in nested lists and tables, in order."""
    if isinstance(value, dict):
        return _numbers(list(value.values()))
    if isinstance(value, list):
        return [number for item in value for number in _numbers(item)]
    return [float(value)] if isinstance(value, int | float) else []
