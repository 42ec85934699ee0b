"""The typed parts of a record: its spec, its tasks, its training curves and its times. Each reads and writes JSON tables."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Self

KINDS = ("weights", "buffers", "masks", "images")  # of the bytes that a method keeps


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Everything that decides the outcome of a run.

    A key that an old record lacks has the default that was in effect when the record was written. The table as it was
    written is kept in `written`, because the name of a record is a hash of it: a missing key is never added to a file.

    Attributes:
        benchmark: the name of the benchmark.
        method: the name of the method.
        network: the name of the network.
        seed: the seed of the tasks, the initial weights and the training.
        regime: the fields of the `Regime`, by name. It is a plain table, because a record of another version may hold
            values that a `Regime` of this version refuses.
        benchmark_options, network_options, method_options: the values of all options, by name.
        heads: "multi" or "shared".
        init: how the weights were initialised.
        freeze: the patterns of the parts of the network that were not trained.
        train_examples: how many training examples per task the training loss was measured on; 0 means all.
        watch_tasks: whether the accuracy on every task was measured after each epoch.
        pretrain: the data set on which the trunk was trained before the sequence; "" means none.
        pretrain_epochs: how many epochs of it at most; 0 means as many as the regime has.
        scenario: "task", "domain" or "class".
        first_tasks: how many tasks of the benchmark, from its first, were learned; 0 means all.
        only_task: the name, or the number from 0, of the only task of the benchmark that was learned; "" means all.
        router: the kind of score of the router whose results were measured; "none" means no router.
        weights: the name of the file from which the trunk had its weights; "" means none.
        trunk: "frozen" if no task changed the trunk.
        adapters: the rank of the adapters; 0 means none.
        adapter_layers: the patterns of the layers with adapters.
        weights_digest: the hash of the file with the weights.
        network_digest: the hash of the configuration of a network from a folder.
        data_digest: the hash of the data, for tasks from a user's own files.
        written: the table as it stands in the file, with keys that this version does not know.
    """

    benchmark: str
    method: str
    network: str
    seed: int
    regime: Mapping[str, Any]
    benchmark_options: Mapping[str, Any]
    network_options: Mapping[str, Any]
    method_options: Mapping[str, Any]
    heads: str = "multi"
    init: str = "default"
    freeze: str = ""
    train_examples: int = 2000
    watch_tasks: bool = False
    pretrain: str = ""
    pretrain_epochs: int = 0
    scenario: str = "task"
    first_tasks: int = 0
    only_task: str = ""
    router: str = "none"
    weights: str = ""
    trunk: str = "learned"
    adapters: int = 0
    adapter_layers: str = "*"
    weights_digest: str | None = None
    network_digest: str | None = None
    data_digest: str | None = None
    written: Mapping[str, Any] = field(repr=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the typed view of a table such as `Run.spec`."""
        return cls(**{**_known(cls, data), "written": dict(data)})

    def replace(self, **changes: Any) -> Self:
        """Return a spec in which some keys have other values, in the fields and in `written`."""
        return type(self).from_dict({**self.written, **changes})


@dataclass(frozen=True)
class TaskInfo:
    """A task of a run: its name, how many classes it has, and how many examples each of its splits has.

    The numbers of examples are None if the file does not hold them. `score` names what stands in place of the accuracy, if
    the task asks for something else than classes.
    """

    name: str
    classes: int
    train: int | None = None
    valid: int | None = None
    test: int | None = None
    score: str | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return cls(**_known(cls, data))

    def to_dict(self) -> dict[str, Any]:
        return _present(vars(self))


class CurvePoint(NamedTuple):
    """The values of one epoch. None: not a finite number, or there was no validation data."""

    lr: float
    loss: float | None
    valid_loss: float | None
    valid_accuracy: float | None


@dataclass(frozen=True)
class Curve:
    """The training curve of one fit.

    Attributes:
        task: the index of the task.
        best: the epoch whose weights were kept, counted from 0.
        epochs: the values of every epoch.
        halved: how often the fit diverged and started again with half the learning rate.
        watched: after each epoch, the accuracy on the test data of every task; empty unless the run had `watch_tasks`.
        used: after each epoch, the share of the weights that are frozen if the task ends there, for methods with masks;
            empty unless `watch_tasks`.
    """

    task: int
    best: int
    epochs: list[CurvePoint]
    halved: int = 0
    watched: list[list[float]] = field(default_factory=list)
    used: list[float] = field(default_factory=list)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        points = [CurvePoint(*(epoch[name] for name in CurvePoint._fields)) for epoch in data["epochs"]]
        return cls(data["task"], data["best"], points, data.get("halved", 0), data.get("watched", []), data.get("used", []))

    def to_dict(self) -> dict[str, Any]:
        optional = {"halved": self.halved, "watched": self.watched, "used": self.used}
        some = {name: value for name, value in optional.items() if value}  # the first records have no such keys
        return {"task": self.task, "best": self.best, "epochs": [point._asdict() for point in self.epochs], **some}


@dataclass(frozen=True)
class Pretraining:
    """The result of the training of the trunk before the sequence.

    Attributes:
        epochs: how many epochs it took.
        valid_accuracy: the accuracy on validation data that the trunk reached with a head that was dropped afterwards.
    """

    epochs: int
    valid_accuracy: float | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return cls(**_known(cls, data))

    def to_dict(self) -> dict[str, Any]:
        return _present(vars(self))


@dataclass(frozen=True)
class Routed:
    """The results without a task id of a router, on the test data at the end.

    Attributes:
        kind: the kind of score that decides.
        accuracy: the accuracy on every task.
        task: the share of the images of every task that are routed to it.
    """

    kind: str
    accuracy: list[float]
    task: list[float]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return cls(**_known(cls, data))

    def to_dict(self) -> dict[str, Any]:
        return _present(vars(self))


@dataclass(frozen=True)
class Seconds:
    """The time that a run took.

    Attributes:
        total: the whole run, with training and testing; None: not known.
        learn: the time that each task took to learn; None: not known.
        parts: what the total was spent on, by name: "data", "method", "first steps", "steps", "validation", "evaluation",
            "saving" and "other"; docs/measures.md tells what they are. None: not known.
    """

    total: float | None = None
    learn: list[float] | None = None
    parts: Mapping[str, float] | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return cls(**_known(cls, data))

    def to_dict(self) -> dict[str, Any]:
        return _present(vars(self))


@dataclass(frozen=True)
class Costs:
    """What a run used. A value is None if it is not known.

    Attributes:
        bytes: what the method keeps after the last task, by kind: "weights", "buffers", "masks" and "images".
        peak_bytes: the most memory that a fit took; on a GPU it is measured, on a CPU it is the sum of what the method
            holds, the gradients and the state of the optimizer.
        steps: the training steps of all fits.
        examples: the training examples in these steps, without those that a method replays.
        flops: the floating-point operations of these steps: matrix products, convolutions and attention.
        joules: the energy that the GPU took during the run.
    """

    bytes: Mapping[str, int] | None = None
    peak_bytes: int | None = None
    steps: int | None = None
    examples: int | None = None
    flops: int | None = None
    joules: float | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return cls(**_known(cls, data))

    def to_dict(self) -> dict[str, Any]:
        return _present(vars(self))

    @property
    def summary(self) -> dict[str, float]:
        """All values by name, those of `bytes` as "bytes" (their sum) and "bytes_weights" and so on; nan: not known."""
        kinds = self.bytes or {}
        found = {"bytes": sum(kinds.values()) if self.bytes else None}
        found |= {f"bytes_{kind}": kinds.get(kind) for kind in KINDS}
        found |= {name: getattr(self, name) for name in ("peak_bytes", "steps", "examples", "flops", "joules")}
        return {name: math.nan if value is None else float(value) for name, value in found.items()}


def _known(cls: type[Spec | TaskInfo | Pretraining | Routed | Seconds | Costs], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the fields of a class; other keys belong to later versions."""
    return {f.name: data[f.name] for f in fields(cls) if f.name in data}


def _present(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
