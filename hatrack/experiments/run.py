"""One experiment: a Run says everything that decides its outcome, and `run` carries it out."""

import dataclasses
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch

from hatrack._version import __version__
from hatrack.benchmarks import BENCHMARKS
from hatrack.benchmarks.custom import fingerprint
from hatrack.engine.choice import Engine, Precision, choose_engine
from hatrack.engine.interleaving import wait_for_gpu
from hatrack.engine.precision import check_precision, precision_scope
from hatrack.experiments.record import Record, clean, name_of
from hatrack.experiments.record_parts import Curve, CurvePoint, Seconds, Spec, TaskInfo
from hatrack.experiments.run_folder import RunFolder, unfinished
from hatrack.methods import METHODS
from hatrack.methods.divergence import Diverged
from hatrack.methods.evaluate import Evaluation, Score, without_task_id
from hatrack.methods.fit import FitResult
from hatrack.methods.method import Method
from hatrack.networks import NETWORKS
from hatrack.networks.initial_weights import Init, initialise
from hatrack.networks.network import Network
from hatrack.options import Option, check, check_value, nearest, parameters
from hatrack.regime import Regime
from hatrack.registry import Registry
from hatrack.seeds import seeded
from hatrack.tasks.device import all_to_device
from hatrack.tasks.split import Split
from hatrack.tasks.task import Task
from hatrack.training.checkpoint import Stopped, stopping
from hatrack.training.progress import Progress
from hatrack.training.trainer import Trainer


@dataclass(frozen=True)
class Run:
    """The complete specification of an experiment. Options that are not given take their defaults.

    Args:
        benchmark: a name in `BENCHMARKS`.
        method: a name in `METHODS`, or a method of your own as "module:Class".
        seed: decides everything random.
        network: a name in `NETWORKS`; by default the benchmark's own.
        heads: "multi" for a head per task, "shared" for one head that all tasks share.
        init: the initial weights, "default" (PyTorch's) or "xavier".
        freeze: parts of the network that stay as they are: patterns of names, separated by commas.
        train_examples: on how many training examples per task the loss is measured after each task; 0 for all.
        regime: how every task is trained.
        benchmark_options: options of the benchmark, by name.
        network_options: options of the network, by name.
        method_options: options of the method, by name.

    Example:
        >>> spec = hr.Run("smnist", "hat", seed=1, regime=hr.Regime(epochs=5), benchmark_options={"data": "sample"})
        >>> record = hr.run(spec, "runs")
    """

    benchmark: str
    method: str
    seed: int = 0
    network: str = ""  # the benchmark's own
    heads: Annotated[Literal["multi", "shared"], Option("a head per task, or one that all tasks share")] = "multi"
    init: Annotated[Init, Option("initial weights: PyTorch's, or Xavier uniform with zero biases")] = "default"
    freeze: Annotated[str, Option("parts of the network that stay as they are: patterns of names, by commas")] = ""
    train_examples: Annotated[
        int, Option("training examples per task on which the loss is measured after each task; 0: all", low=0)
    ] = 2000
    regime: Regime = field(default_factory=Regime)
    benchmark_options: Mapping[str, Any] = field(default_factory=dict)
    network_options: Mapping[str, Any] = field(default_factory=dict)
    method_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if type(self.seed) is not int or not 0 <= self.seed < 2**31:
            raise ValueError(f"seed must be a whole number from 0, not {self.seed!r}")
        check(Run, vars(self))
        object.__setattr__(self, "network", self.network or BENCHMARKS.about(self.benchmark).network)
        tables: dict[str, Registry[Any]] = {"benchmark": BENCHMARKS, "network": NETWORKS, "method": METHODS}
        for kind, table in tables.items():
            entry = table.find(getattr(self, kind))
            object.__setattr__(
                self, f"{kind}_options", complete(getattr(self, kind), entry, getattr(self, f"{kind}_options"))
            )

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Self:
        """Return the run that has this spec, the dict that a record holds."""
        plain = {key: value for key, value in spec.items() if key != "data_digest"}
        for key in ("benchmark_options", "network_options", "method_options"):
            plain[key] = {k: tuple(v) if isinstance(v, list) else v for k, v in plain[key].items()}
        return cls(**{**plain, "regime": Regime(**plain["regime"])})

    @cached_property
    def spec(self) -> dict[str, Any]:
        """Everything that decides the outcome, as a dict for JSON."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if self.benchmark == "own":  # a file's name does not say what is in it
            plain["data_digest"] = fingerprint(self.benchmark_options["tasks"])
        regime = dataclasses.asdict(self.regime)
        if regime["on_divergence"] == "stop":  # left out, so that records from before keep their names
            del regime["on_divergence"]
        result: dict[str, Any] = clean({**plain, "regime": regime})
        return result

    @cached_property
    def name(self) -> str:
        """The name of its record: readable, and different for every different spec."""
        return name_of(self.spec)


def complete(entry_name: str, entry: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of an entry, given or by default, each checked."""
    known = parameters(entry)
    for name, value in options.items():
        if name not in known:
            raise ValueError(f"{entry_name} has no option {name!r}; {nearest(name, known)}")
        check_value(known[name], value)
    values = {name: options.get(name, p.default) for name, p in known.items()}
    return {name: float(v) if known[name].type is float else v for name, v in values.items()}


def build(spec: Run, device: torch.device | str = "cpu") -> tuple[list[Task], Method]:
    """Make the tasks and the untrained method of a run."""
    tasks = all_to_device(BENCHMARKS[spec.benchmark](spec.seed, **spec.benchmark_options), device)
    with seeded(spec.seed, "weights"):
        trunk = NETWORKS[spec.network](tasks[0].shape, **spec.network_options)
        initialise(trunk, spec.init)
    example = tasks[0].train.inputs(torch.arange(min(2, len(tasks[0].train)), device=device))
    net = Network(
        trunk.to(device),
        [task.classes for task in tasks],
        example,
        heads=spec.heads,
        init=spec.init,
        freeze=spec.freeze,
        seed=spec.seed,
    )
    return tasks, METHODS.find(spec.method)(net, **spec.method_options).to(device)


def run(
    spec: Run,
    out: Path | str | None = None,
    *,
    again: bool = False,
    device: torch.device | str = "cpu",
    engine: Engine = "auto",
    precision: Precision = "tf32",
    save_every: float = 5.0,
    progress: Progress | None = None,
) -> Record:
    """Carry out a run, or continue it where it was stopped.

    Args:
        spec: what to run.
        out: the folder for the record and the saved states; None to keep nothing. A run that has its record there is not
            run again.
        again: run even if there is a record.
        device: "cpu" or "cuda".
        engine: how steps run: "auto", "eager", "compiled" or "recorded".
        precision: how matrix products are computed: "tf32", "float32" or "bfloat16".
        save_every: minutes between two saves of the state.
        progress: called after every epoch.

    Returns:
        The record.

    Example:
        >>> record = hr.run(hr.Run("smnist", "hat", benchmark_options={"data": "sample"}), "runs")
        >>> record.summary["accuracy"]
    """
    choose_engine(engine, torch.device(device).type, 0)  # an error now if it can't be had
    check_precision(precision, torch.device(device))
    folder = None if out is None else folder_of(spec, Path(out), minutes=save_every)
    if folder and folder.done and not again:
        record = Record.load(folder.record)
        folder.tidy()
        return record
    if stopping.is_set():
        raise Stopped("stopped before the next run")
    trainer = Trainer(spec.regime, seed=spec.seed, progress=progress or False, engine=engine)
    with precision_scope(precision, torch.device(device)), ExitStack() as open_files:
        began = time.perf_counter()
        tasks, method = build(spec, device)  # what is wrong with a run shows here, before anything is written
        if folder:
            open_files.enter_context(folder)  # an error now, not after hours, if nothing can be written there
            if again:
                folder.start_anew()
            elif folder.done:  # another process had it until now
                return Record.load(folder.record)
            trainer.checkpointer = folder.checkpointer
        try:
            record = _run(spec, tasks, method, trainer, began)
        except Diverged as error:
            kept = f"; its last good state stays in {folder.path}; the same command would end so again" if folder else ""
            error.args = (f"{spec.method} seed {spec.seed}, {error}{kept}",)  # one of many, perhaps
            raise
        record.versions |= versions(device)
        used = precision if torch.device(device).type == "cuda" else "float32"
        engines = sorted({result.engine for result in trainer.fits})
        record.versions |= {"engine": " and ".join(engines) or "none", "precision": used}
        if folder:
            record.save(folder.path.parent)
            folder.remove_states()
    return record


def folder_of(spec: Run, out: Path, *, minutes: float = 5.0) -> RunFolder:
    """The files of a run in a folder of records."""
    return RunFolder(out / f"{spec.name}.part", spec.spec, minutes=minutes)


def stopped_runs(out: Path) -> tuple[list[Run], list[str]]:
    """The runs in a folder that can be continued; and of the others why not."""
    found, others = [], []
    for folder in unfinished(out):
        try:
            spec = Run.from_spec(folder.spec)
            same = spec.name == folder.path.stem
        except (ValueError, TypeError, KeyError, AttributeError):
            same = False
        if not folder.spec:
            others.append(f"{folder.path} holds no state that can be used; remove it to start anew")
        elif not same:
            why = "it was renamed, or was begun by another version or with other data"
            others.append(f"{folder.path} can't be continued: {why}")
        elif blocked := folder.blocked:
            others.append(blocked)
        else:
            found.append(spec)
    return found, others


def _run(spec: Run, tasks: list[Task], method: Method, trainer: Trainer, began: float) -> Record:
    rows: dict[str, list[Any]] = {name: [] for name in ("before", "tests", "trains", "seconds", "usage")}
    spent, start = 0.0, 0
    checkpointer = trainer.checkpointer
    saved = checkpointer.resume(method, trainer) if checkpointer else None
    if saved:
        start, spent = saved["task"], saved["spent"]
        rows = {name: saved[name] for name in rows}
        for task in tasks[:start]:
            method.restore_data(task)
    else:
        rows["before"] = [_score(method, task.test).accuracy for task in tasks]
    for task in tasks[start:]:
        if checkpointer and not (saved and task.index == start):  # else its beginning is saved already
            measured = {**rows, "spent": spent + time.perf_counter() - began}
            checkpointer.begin_task(task.index, method, trainer, measured)
            if stopping.is_set():
                raise Stopped(f"stopped before task {task.name!r}, and saved")
        watch = time.perf_counter()
        method.learn(task, trainer)
        rows["seconds"].append(time.perf_counter() - watch)
        rows["usage"].append(method.usage())
        rows["tests"].append([_score(method, other.test) for other in tasks])
        rows["trains"].append([_score(method, _some(other.train, spec.train_examples)) for other in tasks])
    everything = range(len(tasks))
    record = Record(
        name=spec.name,
        spec=Spec.from_dict(spec.spec),
        tasks=[TaskInfo(t.name, t.classes, len(t.train), len(t.valid), len(t.test)) for t in tasks],
        parameters=method.num_parameters(),
        before=rows["before"],
        accuracy=[[accuracy for _, accuracy in row] for row in rows["tests"]],
        loss=[[loss for loss, _ in row] for row in rows["tests"]],
        train_loss=[[loss for loss, _ in row] for row in rows["trains"]],
        without_task_id=[without_task_id(method, task.test, everything) for task in tasks],
        curves=[_curve(result) for result in trainer.fits],
        usage=rows["usage"],
        seconds=Seconds(total=spent + time.perf_counter() - began, learn=rows["seconds"]),
    )
    return Record.from_dict(record.to_dict())  # with None for numbers that are not finite, as a record that was loaded


def _score(method: Method, split: Split) -> Score:
    return Evaluation(method, split, wait=wait_for_gpu)()


def _curve(result: FitResult) -> Curve:
    return Curve(result.task, result.best, [CurvePoint(*epoch) for epoch in result.epochs], result.halved)


def _some(split: Split, count: int) -> Split:
    return split.part(torch.arange(min(count or len(split), len(split)), device=split.y.device))


def versions(device: torch.device | str) -> dict[str, Any]:
    kind = torch.device(device).type
    return {
        "hatrack": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name() if kind == "cuda" else kind,
        "threads": torch.get_num_threads(),
    }
