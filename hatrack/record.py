"""What a run leaves behind: one JSON file that says what was run and what came out. Reports are made from these alone."""

import json
import math
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from hatrack import metrics

SCHEMA = 1
SCARCE = 0.05  # a layer with less of it free is worth a word
MATRICES = ("accuracy", "loss", "train_loss")


@dataclass
class Record:
    """Entry [t][i] of a matrix: task i after learning task t. All but `seconds` and `versions` follows from `spec`."""

    name: str  # of the file; a hash of the spec is part of it
    spec: dict[str, Any]
    tasks: list[dict[str, Any]]  # name, classes and sizes of every task
    parameters: int
    before: list[float]  # accuracy on every task before any learning
    accuracy: list[list[float]]  # on test data
    loss: list[list[float]]  # on test data; null in the file: not a finite number
    train_loss: list[list[float]]  # on (some of) the training data
    without_task_id: list[float]  # at the end, on test data
    curves: list[dict[str, Any]]  # per fit: task, best epoch, and lr, loss, valid_loss, valid_accuracy of every epoch
    usage: list[dict[str, float]] = field(default_factory=list)  # after each task: what is taken of every layer
    seconds: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def summary(self) -> dict[str, float]:
        """The measures that need no other record."""
        return {
            "accuracy": metrics.average_accuracy(self.accuracy),
            "learning": metrics.learning_accuracy(self.accuracy),
            "forgetting": metrics.forgetting(self.accuracy),
            "backward": metrics.backward_transfer(self.accuracy),
            "forward": metrics.forward_transfer(self.accuracy, self.before),
            "without_task_id": sum(self.without_task_id) / len(self.without_task_id),
            "loss_forgetting": metrics.loss_forgetting(self.train_loss),
        }

    @property
    def capacity(self) -> str:
        """How full the network is at the end, in words; empty for a method that takes nothing for good."""
        taken = self.usage[-1] if self.usage else {}
        if not taken:
            return ""
        fullest = max(taken, key=lambda layer: taken[layer])
        full = [layer for layer, share in taken.items() if 1 - share < SCARCE]
        return f"the fullest layer, {fullest}, is {taken[fullest]:.0%} taken" + (
            f"; under {SCARCE:.0%} is free in {len(full)} of {len(taken)}: a wider network or a larger c leaves more room"
            if full
            else ""
        )

    def save(self, folder: Path | str) -> Path:
        """Write it whole or not at all."""
        path = Path(folder) / f"{self.name}.json"
        text = json.dumps(clean(asdict(self)), indent=1, allow_nan=False)
        write(path, text + "\n")
        return path

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a record, or say in one line why it is none."""
        path = Path(path)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not a record: not JSON ({error})") from None
        if not isinstance(data, dict) or type(data.get("schema")) is not int:
            raise ValueError(f"{path} is not a record: it has no schema number")
        if data["schema"] < 1:
            raise ValueError(f"{path} has schema {data['schema']}; the first is 1")
        if data["schema"] > SCHEMA:
            raise ValueError(f"{path} has schema {data['schema']}, newer than {SCHEMA}, the newest this version can read")
        names = {f.name for f in fields(cls)}
        if missing := sorted(names - {"usage"} - set(data)):  # the first records have none
            raise ValueError(f"{path} is not a whole record: {', '.join(missing)} missing")
        record = cls(**{key: data[key] for key in names if key in data})
        record._check(path)
        return record

    def _check(self, path: Path) -> None:
        kinds = {
            "name": str,
            "spec": dict,
            "tasks": list,
            "parameters": int,
            "curves": list,
            "usage": list,
            "seconds": dict,
            "versions": dict,
        }
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{path} is not a record: {name} is not of the type {kind.__name__}")
        if not self.tasks or not all(isinstance(task, dict) and {"name", "classes"} <= task.keys() for task in self.tasks):
            raise ValueError(f"{path} is not a record: tasks is not a list of named tasks")
        count = len(self.tasks)
        for name in MATRICES:
            rows = getattr(self, name)
            if not isinstance(rows, list) or len(rows) != count or not all(_numbers(row, count) for row in rows):
                raise ValueError(f"{path}: {name} is not a {count} x {count} matrix of numbers")
        for name in ("before", "without_task_id"):
            if not _numbers(getattr(self, name), count):
                raise ValueError(f"{path}: {name} is not a list of {count} numbers")


def _numbers(row: Any, count: int) -> bool:
    return isinstance(row, list) and len(row) == count and all(v is None or isinstance(v, int | float) for v in row)


def clean(value: Any) -> Any:
    """Numbers that are not finite become None, tuples lists: what JSON can hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: clean(v) for key, v in value.items()}
    return [clean(v) for v in value] if isinstance(value, list | tuple) else value


def write(path: Path, content: str | bytes) -> None:
    """To a temporary name, flushed, renamed: a file of this name is always whole."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
