"""What a run leaves behind: one JSON file that says what was run and what came out. Reports are made from these alone."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from hatrack.experiments import metrics
from hatrack.files import schema
from hatrack.files.atomic import read_bytes, write
from hatrack.text import SCARCE

SCHEMA = 1


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
            "without_task_id": metrics.mean(self.without_task_id),
            "loss_forgetting": metrics.loss_forgetting(self.train_loss),
        }

    @property
    def capacity(self) -> str:
        """How full the network is at the end, in words; empty for a method that takes nothing for good."""
        taken = {layer: share for layer, share in (self.usage[-1] if self.usage else {}).items() if share is not None}
        if not taken:
            return ""
        fullest = max(taken, key=lambda layer: taken[layer])
        full = [layer for layer, share in taken.items() if 1 - share < SCARCE]
        said = f"the fullest layer, {fullest}, is {taken[fullest]:.0%} taken"
        if not full:
            return said
        cure = "a wider network or a larger c" if "c" in self.spec["method_options"] else "a wider network"
        return f"{said}; under {SCARCE:.0%} is free in {len(full)} of {len(taken)}: {cure} leaves more room"

    @property
    def halvings(self) -> str:
        """Which tasks were trained with a smaller learning rate because they diverged, in words; empty if none."""
        halved = [curve for curve in self.curves if curve.get("halved")]
        said = [f"{self.tasks[curve['task']]['name']!r} {curve['halved']} x" for curve in halved]
        return f"diverged, so that the learning rate was halved: {', '.join(said)}" if said else ""

    def save(self, folder: Path | str) -> Path:
        """Write it whole or not at all."""
        path = Path(folder) / f"{self.name}.json"
        text = json.dumps(sign(clean(asdict(self))), indent=1, allow_nan=False)
        write(path, text + "\n")
        return path

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a record, or say in one line why it is none, or not as it was written."""
        path = Path(path)
        data = _read(path)
        if not isinstance(data, dict) or type(data.get("schema")) is not int:
            raise ValueError(f"{path} is not a record: it has no schema number")
        if data["schema"] < 1:
            raise ValueError(f"{path} has schema {data['schema']}; the first is 1")
        if data["schema"] > SCHEMA:
            raise ValueError(f"{path} has schema {data['schema']}, newer than {SCHEMA}, the newest this version can read")
        names = {f.name for f in fields(cls)}
        if missing := sorted(names - {"usage"} - set(data)):  # the first records have none
            raise ValueError(f"{path} is not a whole record: {', '.join(missing)} missing")
        try:
            _check(path, data)
        except ValueError as error:
            raise ValueError(f"{path} is not a record: {error}") from None
        return cls(**{key: data[key] for key in names if key in data})


# What a record may hold

SHARE = schema.number(0, 1, null=True)
LOSS = schema.number(-1e39, 1e39, null=True)  # beyond what float32 can hold
WHOLE = schema.number(0, 2**63, whole=True)
SECONDS = schema.number(0, 1e12)
SPEC = schema.fields({
    "benchmark": schema.text,
    "method": schema.text,
    "network": schema.text,
    "seed": WHOLE,
    "regime": schema.table(schema.plain),
    "benchmark_options": schema.table(schema.plain),
    "network_options": schema.table(schema.plain),
    "method_options": schema.table(schema.plain),
})  # fmt: skip
REGIME = schema.fields({}, {"epochs": WHOLE, "schedule": schema.text})
TASK = schema.fields({"name": schema.text, "classes": WHOLE}, {"train": WHOLE, "valid": WHOLE, "test": WHOLE})
EPOCH = schema.fields({"lr": LOSS, "loss": LOSS, "valid_loss": LOSS, "valid_accuracy": SHARE})


def _check(path: Path, data: dict[str, Any]) -> None:
    """Every field is of its kind, none contradicts another, and all of it is as it was written."""
    schema.items(TASK, least=1)("tasks", data["tasks"])
    count = len(data["tasks"])
    curve = {"task": schema.number(0, count - 1, whole=True), "best": WHOLE, "epochs": schema.items(EPOCH)}
    numbers = schema.items(SHARE, count, what="numbers")
    whole = {
        "name": schema.text,
        "spec": SPEC,
        "parameters": WHOLE,
        "before": numbers,
        "accuracy": schema.matrix(SHARE, count),
        "loss": schema.matrix(LOSS, count),
        "train_loss": schema.matrix(LOSS, count),
        "without_task_id": numbers,
        "curves": schema.items(schema.fields(curve, {"halved": WHOLE})),
        "seconds": schema.fields({}, {"total": SECONDS, "learn": schema.items(SECONDS, count)}),
        "versions": schema.table(schema.plain),
    }
    usage = schema.items(schema.table(schema.number(0, null=True)), count if data.get("usage") else 0)
    schema.fields(whole, {"usage": usage})("", data)
    schema.table(schema.plain)("spec", {key: v for key, v in data["spec"].items() if not isinstance(v, dict)})
    REGIME("spec.regime", data["spec"]["regime"])
    for place, found in enumerate(data["curves"]):
        schema.number(0, max(1, len(found["epochs"])) - 1, whole=True)(f"curves[{place}].best", found["best"])
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
    """What a file holds, with a digest of it, so that a change by hand or by accident is noticed."""
    plain = {key: value for key, value in data.items() if key != "digest"}
    return {**plain, "digest": hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()}


def _read(path: Path) -> Any:
    """The JSON in a file. NaN and Infinity are no JSON, though Python writes them."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not a number")

    content = read_bytes(path)
    try:
        return json.loads(content.decode(), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a record: not JSON ({error})") from None


def clean(value: Any) -> Any:
    """Numbers that are not finite become None, tuples lists: what JSON can hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: clean(v) for key, v in value.items()}
    return [clean(v) for v in value] if isinstance(value, list | tuple) else value
