"""One experiment: `run` carries out what a Run specifies, and continues a run that was stopped."""

import math
import platform
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hatrack._version import __version__
from hatrack.engine.choice import Engine, Precision, choose_engine
from hatrack.engine.compiled import import_compiler
from hatrack.engine.interleaving import wait_for_gpu
from hatrack.engine.precision import check_precision, precision_scope
from hatrack.experiments.ahead import compile_ahead
from hatrack.experiments.arguments import check_arguments, check_note
from hatrack.experiments.build import build_method, build_tasks, build_trunk, described_trunk
from hatrack.experiments.kept_models import kept_models
from hatrack.experiments.pretraining import pretrained_trunk, pretraining_task
from hatrack.experiments.record import Record
from hatrack.experiments.record_parts import Curve, CurvePoint, Seconds, Spec, TaskInfo
from hatrack.experiments.resources import EnergyMeter, costs_of
from hatrack.experiments.routing import fit_and_route
from hatrack.experiments.run_folder import RunFolder, unfinished
from hatrack.experiments.run_log import end_log, open_log, restore_lines
from hatrack.experiments.spec import Run as Run
from hatrack.files.atomic import is_plain
from hatrack.inspection.measuring import CapacityCurve, capacity
from hatrack.methods import METHODS
from hatrack.methods.divergence import Diverged
from hatrack.methods.evaluate import Evaluations, Score, without_task_ids
from hatrack.methods.fit import FitResult
from hatrack.methods.method import Method
from hatrack.tasks.split import Split
from hatrack.tasks.targets import other_score
from hatrack.tasks.task import Task
from hatrack.text import printable, shorten
from hatrack.tracking.trackers import Log, make_trackers
from hatrack.training.checkpoint import Stopped, stopping
from hatrack.training.progress import Progress
from hatrack.training.ranks import Ranks
from hatrack.training.saving import save
from hatrack.training.trainer import Trainer

AfterTask = Callable[[list[list[float]]], None]
UNKNOWN = Score(math.nan, math.nan)  # on training or validation data of a task that is not learned yet, or has none


def run(
    spec: Run,
    out: Path | str | None = None,
    *,
    again: bool = False,
    device: torch.device | str = "cpu",
    engine: Engine = "auto",
    precision: Precision = "tf32",
    save_every: float = 5.0,
    keep_model: bool = False,
    keep_each: bool = False,
    progress: Progress | None = None,
    after_task: AfterTask | None = None,
    tuned: Mapping[str, Any] | None = None,
    log: Log | Sequence[Log] | None = None,
    ranks: Ranks | None = None,
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
        keep_model: save the model beside the record, as NAME.safetensors, for `hatrack.load`.
        keep_each: save the model after every task beside the record, as NAME.task-1.safetensors and so on.
        progress: called after every epoch, also of the pretraining, which has the task number -1.
        after_task: called after every task with the accuracies on validation data, a row per task learned and a column per
            task; what it raises ends the run.
        tuned: how the options were chosen, for the field `tuned` of a new record. A record that is there already keeps its
            own, and a run that is continued the one that it began with.
        log: where the results of every epoch go, as in `Trainer`: "tensorboard", "wandb", a function, a list of these. It is
            no part of the run: name and record are the same without it.
        ranks: the processes that carry out this run together, each with its part of every batch; None for this one alone.

    Returns:
        The record.

    Example:
        >>> spec = hr.Run("smnist", "hat", regime=hr.Regime(epochs=2), benchmark_options={"data": "sample"})
        >>> record = hr.run(spec, "runs")
        >>> record.summary["accuracy"]
    """
    check_arguments(spec, out, device, save_every, progress, after_task)
    check_note(tuned)
    trackers = make_trackers(log, None if out is None else Path(out), spec.name)
    choose_engine(engine, torch.device(device).type, 0)  # an error now if it can't be had
    check_precision(precision, torch.device(device))
    folder = None if out is None else folder_of(spec, Path(out), minutes=save_every)
    if folder and folder.done and not again:
        record = Record.load(folder.record)
        models = [folder.model] if keep_model else []
        models += [folder.task_model(number) for number in range(len(record.tasks))] if keep_each else []
        if all(model.exists() for model in models):
            folder.tidy()
            return record
        again = True  # they were not kept
    if stopping.is_set():
        raise Stopped("stopped before the next run")
    trainer = Trainer(spec.regime, seed=spec.seed, progress=progress or False, engine=engine)
    with precision_scope(precision, torch.device(device)), ExitStack() as open_files:
        began, kind = time.perf_counter(), METHODS.find(spec.method)
        if spec.benchmark_options.get("data") != "sample" and trainer.likely_compiles(kind, torch.device(device).type):
            import_compiler()  # while data are loaded and the method is built
        watch = trainer.stopwatch
        with watch("data"):  # what is wrong with a run shows here, before anything is written
            trainer.tasks = tasks = build_tasks(spec, device)
        trainer.check_tasks()
        trainer.count_costs, trainer.ranks = True, ranks
        if spec.watch_tasks:
            trainer.watch_tasks, trainer.after_epoch = tasks, CapacityCurve()
        ahead = None
        if trainer.compiles(kind, torch.device(device).type):
            import_compiler()
            ahead = compile_ahead(spec, tasks, kind, torch.device(device), precision)
        with watch("method"):
            method = build_method(spec, tasks, build_trunk(spec, tasks), device)
        for task in tasks:
            task.target.check_for(type(method).__name__, method.targets, task.name)
        if ranks:
            ranks.check_method(method)
        first = pretraining_task(spec, tasks)
        if folder:
            open_files.enter_context(folder)  # an error now, not after hours, if nothing can be written there
            if again:
                folder.start_anew()
            elif folder.done:  # another process had it until now
                return Record.load(folder.record)
            keep_model, keep_each = folder.remember_kept(keep_model, keep_each)
            trainer.checkpointer, tuned = folder.checkpointer, folder.keep_note(tuned)
        trainer.log = open_log(spec, tasks, method, folder, trackers, device, began)
        open_files.push(partial(end_log, trainer.log))
        trainer.wait_for_code = ahead.wait if ahead else None
        try:
            pretrained = None
            if first is not None:
                pretrained = pretrained_trunk(
                    spec, tasks, first, folder, device=device, engine=engine, progress=progress, log=trainer.log
                )
                method = build_method(spec, tasks, pretrained.trunk, device)
            record = _run(spec, tasks, method, trainer, began, after_task, folder if keep_each else None)
            record.pretraining = pretrained.result if pretrained else None
        except Diverged as error:
            saved = folder and folder.has_states and folder.path
            kept = f"; its last good state stays in {saved}; the same command would end so again" if saved else ""
            error.args = (f"{spec.method} seed {spec.seed}, {error}{kept}",)  # one of many, perhaps
            raise
        record.tuned = dict(tuned or {})
        record.extended = folder.extended() if folder else {}
        record.versions |= versions(device)
        used = precision if torch.device(device).type == "cuda" else "float32"
        engines = sorted({result.engine for result in trainer.fits})
        if ahead and engines == ["compiled, stacked" if ahead.lanes else "compiled"]:
            ahead.remember()
        record.versions |= {"engine": " and ".join(engines) or "none", "precision": used}
        record.versions |= {"ranks": ranks.size} if ranks else {}
        if folder and keep_model:
            save(method, folder.model, **described_trunk(spec))
        if folder:
            if not keep_model and is_plain(folder.model):  # of the record that is replaced now
                folder.model.unlink()
            record.models = kept_models(folder.record, len(tasks) if keep_each else 0)
            record.save(folder.path.parent)
            trainer.log.end("finished")
            folder.remove_states()
    return record


def folder_of(spec: Run, out: Path, *, minutes: float = 5.0) -> RunFolder:
    """The files of a run in a folder of records."""
    return RunFolder(out / f"{spec.name}.part", spec.spec, minutes=minutes)


def stopped_runs(out: Path, own: Collection[str] = ()) -> tuple[list[Run], list[str]]:
    """Return the runs in a folder that can be continued; and of the others why not.

    Args:
        out: a folder of records, or the folder NAME.part of one run.
        own: methods of the user's own, "module:Class", that may be imported: a file alone never decides that.
    """
    found, others = [], []
    for folder in unfinished(out):
        why = "it was renamed, or was begun by another version or with other data"
        try:
            spec = Run.from_spec(folder.spec, own)
            same = spec.name == folder.path.stem
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            same = False
            if isinstance(error, ValueError):  # such as a method of the user's own whose module is not there
                why = shorten(printable(error), 300)
        if not folder.spec:
            others.append(f"{folder.path} holds no state that can be used; remove it to start anew")
        elif not same:
            others.append(f"{folder.path} can't be continued: {why}")
        elif blocked := folder.blocked:
            others.append(blocked)
        else:
            found.append(spec)
    return found, others


def _run(
    spec: Run,
    tasks: list[Task],
    method: Method,
    trainer: Trainer,
    began: float,
    after_task: AfterTask | None = None,
    models: RunFolder | None = None,
) -> Record:
    """Learn all tasks and return the record; `models` is where the model after each task is saved, None: nowhere."""
    rows: dict[str, list[Any]] = {name: [] for name in ("before", "tests", "trains", "valids", "seconds", "usage")}
    tests, trains = [task.test for task in tasks], [first_examples(task.train, spec.train_examples) for task in tasks]
    spent, start = 0.0, 0
    checkpointer, watch = trainer.checkpointer, trainer.stopwatch
    saved = checkpointer.resume(method, trainer) if checkpointer else None
    if saved:
        start, spent = saved["task"], saved["spent"]
        watch.go_on_from(saved.get("parts"))
        if trainer.log:
            restore_lines(trainer.log, trainer.fits, saved)
        rows = {name: saved[name] if name in saved else [[] for _ in range(start)] for name in rows}  # old states lack some
        for task in tasks[:start]:
            if models and not (file := models.task_model(task.index)).exists():
                raise ValueError(
                    f"{file} is missing, because the run was begun without --keep-each; --again runs it from the beginning"
                )
            method.restore_data(task)
            method.net.set_target(task)
            method.net.note_example(task)
    else:
        with watch("evaluation"):
            rows["before"] = [score.accuracy for score in Evaluations(method, tests, wait=wait_for_gpu)()]
    energy = EnergyMeter(method.net.example.device, saved.get("joules") if saved else 0.0)
    for task in tasks[start:]:
        if checkpointer and not (saved and task.index == start):  # else its beginning is saved already
            so_far = {"spent": spent + time.perf_counter() - began, "parts": watch.seconds(), "joules": energy.joules()}
            with watch("saving"):
                checkpointer.begin_task(task.index, method, trainer, {**rows, **so_far})
            if stopping.is_set():
                checkpointer.wait()
                raise Stopped(f"stopped before task {task.name!r}, and saved")
        start_of_task = time.perf_counter()
        method.learn(task, trainer)
        if trainer.ranks:
            trainer.ranks.check_same(method)
        rows["seconds"].append(time.perf_counter() - start_of_task)
        if models:  # before the next task begins: a run that continues there has this model
            with watch("saving"):
                save(method, models.task_model(task.index), **described_trunk(spec))
        rows["usage"].append(method.usage())
        learned, valids = trains[: task.index + 1], [learned.valid for learned in tasks[: task.index + 1]]
        with watch("evaluation"):
            scores = iter(Evaluations(method, [*tests, *learned, *valids], wait=wait_for_gpu)())
        rows["tests"].append([next(scores) for _ in tests])
        if trainer.log:
            trainer.log.scores(task.index, [accuracy for _, accuracy in rows["tests"][-1]])
        rows["trains"].append([next(scores) if k < len(learned) else UNKNOWN for k in range(len(tasks))])
        rows["valids"].append([score if len(split) else UNKNOWN for score, split in zip(scores, valids, strict=True)])
        if after_task:
            after_task([[accuracy for _, accuracy in row] for row in _padded(rows["valids"], len(tasks))])
    with watch("evaluation"):
        guesses = without_task_ids(method, tests, range(len(tasks)), wait=wait_for_gpu)
    record = Record(
        name=spec.name,
        spec=Spec.from_dict(spec.spec),
        tasks=[_task_info(task) for task in tasks],
        parameters=method.num_parameters(),
        before=rows["before"],
        accuracy=[[accuracy for _, accuracy in row] for row in rows["tests"]],
        loss=[[loss for loss, _ in row] for row in rows["tests"]],
        train_loss=[[loss for loss, _ in row] for row in rows["trains"]],
        without_task_id=guesses,
        valid_accuracy=[[accuracy for _, accuracy in row] for row in _padded(rows["valids"], len(tasks))],
        valid_loss=[[loss for loss, _ in row] for row in _padded(rows["valids"], len(tasks))],
        curves=[_curve(result) for result in trainer.fits],
        usage=rows["usage"],
        weights_used=found.to_dict() if (found := capacity(method)).layers else {},
        routed=None if spec.router == "none" else fit_and_route(method, tasks, spec.router, wait=wait_for_gpu),
        seconds=Seconds(spent + time.perf_counter() - began, rows["seconds"], watch.seconds()),
        costs=costs_of(method, trainer.fits, energy.joules()),
    )
    if checkpointer:
        checkpointer.wait()
    return Record.from_dict(record.to_dict())  # with None for numbers that are not finite, as a record that was loaded


def _task_info(task: Task) -> TaskInfo:
    sizes = len(task.train), len(task.valid), len(task.test)
    return TaskInfo(task.name, task.classes, *sizes, other_score(task.target))


def _padded(rows: list[list[Score]], count: int) -> list[list[Score]]:
    """Return rows of `count` scores each."""
    return [row + [UNKNOWN] * (count - len(row)) for row in rows]


def _curve(result: FitResult) -> Curve:
    points = [CurvePoint(*epoch) for epoch in result.epochs]
    return Curve(result.task, result.best, points, result.halved, result.watched, result.used)


def first_examples(split: Split, count: int) -> Split:
    """Return the first so many examples of a split, all of them for 0: those on which the training loss is measured."""
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
