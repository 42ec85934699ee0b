"""The record of a run: one JSON file with its spec and its results. Reports are made from records alone."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from hatrack.experiments import metrics
from hatrack.experiments.record_parts import Costs, Curve, Pretraining, Routed, Seconds, Spec, TaskInfo
from hatrack.experiments.record_schema import check_fields
from hatrack.files.atomic import read_bytes, write
from hatrack.text import SCORES, is_held

SCHEMA = 1
ADDED = (  # fields that a file has only if they are not empty
    "pretraining", "valid_accuracy", "valid_loss", "costs", "weights_used", "tuned", "routed", "extended", "models",
)  # fmt: skip


@dataclass(repr=False)
class Record:
    """The results of a run. Everything but `seconds`, `versions`, `tuned`, `extended` and `models` follows from `spec`.

    Entry [t][i] of a matrix is the value on task i after learning task t, both counted from 0. A value that is not a
    finite number is None.

    Args:
        name: the name of the file without its ending; a hash of the spec is part of it.
        spec: what was run.
        tasks: the name, the number of classes and the numbers of examples of every task.
        parameters: how many numbers the method keeps at the end.
        before: the accuracy on the test data of every task before any training.
        accuracy: the matrix of accuracies on test data.
        loss: the matrix of losses on test data.
        train_loss: the matrix of losses on (some of) the training data of the tasks learned so far; None for later tasks.
            Records of older versions have values there.
        without_task_id: the accuracy on every task at the end if the task id is not given.
        curves: the training curve of every fit, in order.
        usage: after each task, the share of every layer that finished tasks have taken.
        seconds: how long the run took.
        versions: the versions of the libraries, the device, the engine and the precision.
        schema: the version of the file format.
        pretraining: the result of the pretraining; None if there was none.
        valid_accuracy: the matrix of accuracies on the validation data of the tasks learned so far; None for later tasks and
            for tasks without such data. It is empty in records of older versions.
        valid_loss: the matrix of losses on the same data.
        costs: what the run used: bytes, steps, examples, operations, energy; None in records of older versions.
        weights_used: what each task uses of the weights at the end, as `hatrack.inspection.Capacity` has it; empty for a
            method without masks and in records of older versions.
        tuned: how options of the run were chosen, by `hatrack tune`: protocol, trials and more; empty if they were not.
        routed: the results of a router, which finds the task of an image, at the end; None if there was none.
        extended: what the run went on from, by `hatrack extend`: the name of that record ("from"), its number of tasks
            ("tasks"), and how many numbers are missing because models after single tasks were not kept ("missing"); empty
            for a run that began with the first task.
        models: the digests of the models that were kept beside the record, by "end", "task-1" and so on; see
            `hatrack.experiments.kept_models`.

    Example:
        >>> import hatrack as hr
        >>> record = hr.Record.load("records/smnist-hat-seed0-35e1a86e80eb.json")
        >>> record
        Record(benchmark='smnist', method='hat', seed=0, tasks=2, accuracy=0.9915)
        >>> record.spec.regime["lr"], record.tasks[0].name, record.curves[0].epochs[-1].valid_accuracy
        (0.05, 'digits 0-4', 0.9934626280235346)
        >>> record.summary["forgetting"]
        0.0
    """

    name: str
    spec: Spec
    tasks: list[TaskInfo]
    parameters: int
    before: list[float]
    accuracy: list[list[float]]
    loss: list[list[float]]
    train_loss: list[list[float]]
    without_task_id: list[float]
    curves: list[Curve]
    usage: list[dict[str, float]] = field(default_factory=list)
    seconds: Seconds = field(default_factory=Seconds)
    versions: dict[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA
    pretraining: Pretraining | None = None
    valid_accuracy: list[list[float | None]] = field(default_factory=list)
    valid_loss: list[list[float | None]] = field(default_factory=list)
    costs: Costs | None = None
    weights_used: dict[str, Any] = field(default_factory=dict)
    tuned: dict[str, Any] = field(default_factory=dict)
    routed: Routed | None = None
    extended: dict[str, Any] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        spec, accuracy = self.spec, metrics.average_accuracy(self.accuracy)
        what = f"benchmark={spec.benchmark!r}, method={spec.method!r}, seed={spec.seed}"
        return f"Record({what}, tasks={len(self.tasks)}, {self.score}={accuracy:.4f})"

    @property
    def score(self) -> str:
        """The name of what `accuracy` holds: "accuracy", or another score that all tasks have, or "score" if they differ."""
        names = {task.score or "accuracy" for task in self.tasks}
        return names.pop() if len(names) == 1 and names < {*SCORES} else "score"

    @property
    def summary(self) -> dict[str, float]:
        """The measures that need no other record, by name. See `hatrack.experiments.metrics`.

        Forward transfer is nan if every task has a head of its own, because that head is untrained until then.
        """
        return {
            "accuracy": metrics.average_accuracy(self.accuracy),
            "learning": metrics.learning_accuracy(self.accuracy),
            "forgetting": metrics.forgetting(self.accuracy),
            "forgetting_mirzadeh": metrics.forgetting_mirzadeh(self.accuracy),
            "backward": metrics.backward_transfer(self.accuracy),
            "forward": metrics.forward_transfer(self.accuracy, self.before) if self._transfers_forward else math.nan,
            "without_task_id": metrics.mean(self.without_task_id),
            "loss_forgetting": metrics.loss_forgetting(self.train_loss),
            **({"routed": metrics.mean(self.routed.accuracy)} if self.routed else {}),
        }

    @property
    def _transfers_forward(self) -> bool:
        """Whether an earlier task could help a later one before that is learned: they have the same outputs."""
        return self.spec.heads == "shared" and self.spec.scenario != "class"

    @property
    def valid_average(self) -> float:
        """The mean accuracy over all tasks at the end on validation data, by which options may be chosen; nan without it."""
        last = [math.nan if value is None else value for value in self.valid_accuracy[-1]] if self.valid_accuracy else []
        return metrics.mean(last) if last else math.nan

    @property
    def held(self) -> str:
        """A sentence that names the parameters that no task after the first could change; empty if there are none."""
        names = [name for name in (self.usage[-1] if self.usage else {}) if is_held(name)]
        return f"not trained after the first task: {', '.join(names)}" if names else ""

    @property
    def halvings(self) -> str:
        """A sentence that names the tasks whose learning rate was halved because they diverged; empty if none."""
        tasks = [f"{self.tasks[curve.task].name!r} {curve.halved} x" for curve in self.curves if curve.halved]
        return f"diverged, so that the learning rate was halved: {', '.join(tasks)}" if tasks else ""

    def save(self, folder: Path | str) -> Path:
        """Write the record to `folder`, completely or not at all.

        Args:
            folder: a folder that exists.

        Returns:
            The path of the file, `folder/name.json`.
        """
        path = Path(folder) / f"{self.name}.json"
        text = json.dumps(sign(self.to_dict()), indent=1, allow_nan=False)
        write(path, text + "\n", follow=False)
        return path

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read the file of a record.

        Args:
            path: the file.

        Returns:
            The record.

        Raises:
            ValueError: the file is not a record, or it was changed after it was written. The message is one line.
        """
        path = Path(path)
        data = _read(path)
        if not isinstance(data, dict) or type(data.get("schema")) is not int:
            raise ValueError(f"{path} is not a record: it has no schema number")
        if data["schema"] < 1:
            raise ValueError(f"{path} has schema {data['schema']}; the first is 1")
        if data["schema"] > SCHEMA:
            raise ValueError(f"{path} has schema {data['schema']}, newer than {SCHEMA}, the newest this version can read")
        names = {f.name for f in fields(cls)}
        if missing := sorted(names - {"usage", *ADDED} - set(data)):  # the first records have none
            raise ValueError(f"{path} is not a whole record: {', '.join(missing)} missing")
        try:
            check_fields(data)
            _check_identity(path, data)
        except ValueError as error:
            raise ValueError(f"{path} is not a record: {error}") from None
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the record that a table of plain values holds, such as `to_dict` returns. Nothing is checked."""
        plain = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        return cls(**{
            **plain,
            "spec": Spec.from_dict(data["spec"]),
            "tasks": [TaskInfo.from_dict(task) for task in data["tasks"]],
            "curves": [Curve.from_dict(curve) for curve in data["curves"]],
            "seconds": Seconds.from_dict(data["seconds"]),
            "pretraining": Pretraining.from_dict(data["pretraining"]) if data.get("pretraining") else None,
            "costs": Costs.from_dict(data["costs"]) if data.get("costs") else None,
            "routed": Routed.from_dict(data["routed"]) if data.get("routed") else None,
        })  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain values, as its file holds them."""
        result: dict[str, Any] = clean({
            **{f.name: value for f in fields(self) if (value := getattr(self, f.name)) or f.name not in ADDED},
            "spec": dict(self.spec.written),
            "tasks": [task.to_dict() for task in self.tasks],
            "curves": [curve.to_dict() for curve in self.curves],
            "seconds": self.seconds.to_dict(),
            **({"pretraining": self.pretraining.to_dict()} if self.pretraining else {}),
            **({"costs": self.costs.to_dict()} if self.costs else {}),
            **({"routed": self.routed.to_dict()} if self.routed else {}),
        })  # fmt: skip
        return result


def _check_identity(path: Path, data: Mapping[str, Any]) -> None:
    """Raise a ValueError unless spec, name, file name and digest belong together."""
    if data["name"] != name_of(data["spec"]):
        raise ValueError(f"its spec is that of {name_of(data['spec'])}, its name {data['name']}")
    if path.stem != data["name"]:
        raise ValueError(f"the file of this run is called {data['name']}.json")
    if "digest" in data and data["digest"] != sign(data)["digest"]:  # the first records have none
        raise ValueError("its digest differs: it was changed after it was written")


def name_of(spec: Mapping[str, Any]) -> str:
    """Return the name of a run and of its record: readable, and different for every different spec.

    A method of a user's own has a name such as "mymethods:MyMethod"; what can't stand in the name of a file becomes "-".
    """
    digest = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()
    method = re.sub(r"[^\w-]", "-", str(spec["method"]))
    return f"{spec['benchmark']}-{method}-seed{spec['seed']}-{digest[:12]}"


def sign(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data with a digest of it, so that a later change is noticed."""
    plain = {key: value for key, value in data.items() if key != "digest"}
    return {**plain, "digest": hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()}


def _read(path: Path) -> Any:
    """Return the JSON in a file. Refuse NaN and Infinity: Python writes them, but they are not JSON."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not a number")

    content, seen = read_bytes(path), dict[str, float]()
    try:  # equal numbers are one object: a folder of thousands of records takes a third less memory
        return json.loads(
            content.decode(), parse_constant=refuse, parse_float=lambda text: seen.setdefault(text, float(text))
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a record: not JSON ({error})") from None


def clean(value: Any) -> Any:
    """Return a value as JSON can hold it: numbers that are not finite become None, tuples become lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: clean(v) for key, v in value.items()}
    return [clean(v) for v in value] if isinstance(value, list | tuple) else value
