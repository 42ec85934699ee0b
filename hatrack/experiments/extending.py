"""Extending a run: going on with more tasks of the sequence from the model that a finished run has kept.

The state of the finished run is brought into the form of a checkpoint of the longer run, in the folder of that run. The rest
is a run that continues. So an extension that is killed goes on as any run does, and its record is, bit for bit, that of the
longer run from its beginning. The accuracies on the new tasks after each of the old ones need the models after these tasks
(`--keep-each`); without them these numbers are None.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hatrack.benchmarks import BENCHMARKS
from hatrack.benchmarks.task_file import grew_from
from hatrack.engine.choice import Engine, Precision, choose_engine
from hatrack.engine.interleaving import wait_for_gpu
from hatrack.engine.precision import precision_scope
from hatrack.experiments.build import build_method, build_tasks, build_trunk, described_trunk
from hatrack.experiments.kept_models import check_model
from hatrack.experiments.record import Record, name_of
from hatrack.experiments.record_parts import Spec
from hatrack.experiments.run import versions
from hatrack.experiments.run_folder import RunFolder, task_model
from hatrack.experiments.spec import Run
from hatrack.methods import METHODS
from hatrack.methods.evaluate import Evaluations
from hatrack.methods.fit import EpochResult, FitResult
from hatrack.methods.method import Method
from hatrack.tasks.split import Split
from hatrack.tasks.task import Task
from hatrack.training.saving import load, save
from hatrack.training.trainer import CarriedState, Trainer

HINTS = {
    "pmnist": "runs with --permutations prefix can be extended",
    "pmnist-blocks": "runs with --permutations prefix can be extended",
    "rmnist": "runs with a --step that is not 0 can be extended",
}


def extended_run(record: Record, tasks: int, own: Collection[str] = ()) -> Run:
    """Return the run with more tasks of the sequence of which a finished run has learned the first ones.

    Args:
        record: the record of the finished run.
        tasks: the number of tasks of the longer run.
        own: methods of the user's own, "module:Class", that may be imported.

    Raises:
        ValueError: if there is no such run, or the finished run can't be continued.
    """
    old = Run.from_spec(record.spec.written, own)
    if old.name != record.name and not _only_grew(old, record):
        raise ValueError(f"{record.name} can't be extended: this version, or the present data, would make another run of it")
    if tasks <= len(record.tasks):
        raise ValueError(f"--tasks must be more than {len(record.tasks)}, the tasks of the record, not {tasks}")
    if why := why_not(record.spec, tasks):
        raise ValueError(f"{record.name} can't be extended: {why}")
    total = len(BENCHMARKS[old.benchmark](old.seed, **old.benchmark_options))
    if tasks <= total:
        return replace(old, first_tasks=tasks if tasks < total else 0)
    try:
        if not isinstance(old.benchmark_options.get("tasks"), int):
            raise ValueError("the benchmark has a fixed number of tasks")
        return replace(old, first_tasks=0, benchmark_options={**old.benchmark_options, "tasks": tasks})
    except ValueError:
        bounds = f"from {len(record.tasks) + 1} to {total}" if total > len(record.tasks) else f"at most {total}"
        every = "" if total > len(record.tasks) else ", which the record has already"
        raise ValueError(f"--tasks must be {bounds}, the tasks of {old.benchmark}{every}, not {tasks}") from None


def _only_grew(old: Run, record: Record) -> bool:
    """Return whether a run would be that of a record, but for tasks that were added to the user's own TOML file since."""
    digest = record.spec.data_digest
    same = digest and name_of({**old.spec, "data_digest": digest}) == record.name
    return bool(same) and grew_from(old.benchmark_options["tasks"], len(record.tasks), digest or "")


def why_not(spec: Spec, tasks: int) -> str:
    """Return why a run can't be extended to so many tasks, as far as its options alone say it; "" if they don't.

    Args:
        spec: what was run.
        tasks: the number of tasks of the longer run.
    """
    options = spec.method_options
    never, room = options.get("reuse") == "never", options.get("room", 0)
    for why, wrong in {
        "the state of its optimizer is carried over from task to task, and a model does not hold it": (
            spec.regime.get("keep_state")
        ),
        "the accuracy on the new tasks after each epoch (--watch-tasks) was not measured": spec.watch_tasks,
        "its trunk was pretrained": spec.pretrain,
        "it learned a single task of its benchmark (--only-task)": spec.only_task,
        "--permutations fresh draws other tasks every time": spec.benchmark_options.get("permutations") == "fresh",
        "--columns budget makes columns that depend on the number of tasks": options.get("columns") == "budget",
        "--reuse never with --room 0 divides the network among as many tasks as the run has; runs with --room N can be "
        "extended to N tasks": never and not room,
        f"--room {room} divides the network among {room} tasks": never and room and tasks > room,
    }.items():
        if wrong:
            return why
    return ""


def prepare(
    path: Path,
    record: Record,
    spec: Run,
    folder: RunFolder,
    *,
    device: torch.device | str,
    engine: Engine,
    precision: Precision,
    keep_each: bool = False,
) -> None:
    """Write the state in which the first new task begins into the folder of the longer run, unless a state is there.

    Args:
        path: the file of the record of the finished run; its model lies beside it.
        record: the record of the finished run.
        spec: the longer run, see `extended_run`.
        folder: the files of the longer run.
        device, engine, precision: how the longer run is carried out.
        keep_each: also write the models after each of the old tasks, in the form of the longer run's.

    Raises:
        ValueError: if the longer run would not have begun as the finished run did.
    """
    old = Run.from_spec(record.spec.written, (record.spec.method,))
    model = path.with_suffix(".safetensors")
    if not model.exists():
        raise ValueError(f"{model} is missing: hatrack run ... --keep-model keeps the model that extend goes on from")
    with precision_scope(precision, torch.device(device)), folder:
        if folder.done or any(file.suffix == ".safetensors" for file in folder.files()):
            return
        tasks = build_tasks(spec, device)
        _check_beginning(old, build_tasks(old, device), tasks)
        method = build_method(spec, tasks, build_trunk(spec, tasks), device)
        check_growing(old, tasks, len(record.tasks), method)
        rows, missing = _measured(path, record, spec, tasks, method, folder if keep_each else None)
        trainer = Trainer(spec.regime, seed=spec.seed, progress=False, engine=engine)
        trainer.fits = _fits(record)
        trainer.carried[method] = CarriedState(Counter(curve.task for curve in record.curves))
        folder.checkpointer.begin_task(len(record.tasks), method, trainer, rows)
        folder.checkpointer.wait()
        folder.note_extended({"from": record.name, "tasks": len(record.tasks), "missing": missing})


def other_conditions(record: Record, spec: Run, *, device: str, engine: Engine, precision: Precision) -> list[str]:
    """Return what differs between how a finished run was computed and how an extension of it would be.

    Each of the differences can change the last bits of results.

    Args:
        record: the record of the finished run.
        spec: the longer run.
        device, engine, precision: how it would be carried out.
    """
    now = versions(device)
    trainer = Trainer(spec.regime, seed=spec.seed, progress=False, engine=engine)
    trainer.tasks = build_tasks(spec, "cpu")
    steps = min(trainer.count_steps(METHODS.find(spec.method), task, spec.regime.at(task.index)) for task in trainer.tasks)
    compiled, recorded = choose_engine(engine, torch.device(device).type, steps)
    now["engine"] = "compiled" if compiled else "recorded" if recorded else "eager"
    now["precision"] = precision if torch.device(device).type == "cuda" else "float32"
    names = ("torch", "device", "threads", "engine", "precision")
    then = record.versions
    found = [
        f"{name} {then[name]} -> {now[name]}" for name in names if name in then and then[name] not in (now[name], "none")
    ]
    old, most = (max(task.classes for task in part) for part in (trainer.tasks[: len(record.tasks)], trainer.tasks))
    if compiled and old < most:  # heads have room for as many in compiled steps (`FitLoop._paddings`)
        found.append(f"most classes of a task {old} -> {most}")
    return found


def _check_beginning(old: Run, before: Sequence[Task], tasks: Sequence[Task]) -> None:
    """Raise an error unless the longer sequence begins with the tasks of the shorter one."""
    for one, other in zip(before, tasks, strict=False):
        same = (one.name, one.classes, one.first) == (other.name, other.classes, other.first)
        splits = ((one.train, other.train), (one.valid, other.valid), (one.test, other.test))
        if not same or not all(_same_data(*pair) for pair in splits):
            hint = HINTS.get(old.benchmark, "runs with --first-tasks of the longer sequence can be extended")
            raise ValueError(
                f"task {one.index + 1} of {old.benchmark} is another one in a sequence of {len(tasks)} tasks than in one of "
                f"{len(before)}: {hint}"
            )


def _same_data(one: Split, other: Split) -> bool:
    """Return whether two splits hold the same examples in the same order, and the network sees them in the same way."""
    a, b = one.transform, other.transform
    pairs = [(one.x, other.x), (one.y, other.y), (one.rows, other.rows), (a.mean, b.mean), (a.std, b.std)]
    if a.pixels is not None and b.pixels is not None:
        pairs.append((a.pixels, b.pixels))
    alike = (a.pixels is None) == (b.pixels is None) and one.augment == other.augment
    return alike and all(x is y or torch.equal(x, y) for x, y in pairs)


def check_growing(old: Run, tasks: Sequence[Task], count: int, whole: Method) -> None:
    """Raise an error unless a method that is built for the first tasks and then grows is the one built for all tasks."""
    grown = build_method(old, tasks[:count], build_trunk(old, tasks), whole.net.example.device)
    _grow(grown, whole)
    one, two = grown.state_dict(), whole.state_dict()
    wrong = [name for name in two if name not in one or one[name].shape != two[name].shape or not one[name].equal(two[name])]
    if wrong or one.keys() != two.keys():
        name = (wrong or sorted(one.keys() - two.keys()))[0]
        raise ValueError(
            f"{old.method} depends on the number of tasks that it is built for ({name} differs), so that a run of {count} "
            f"tasks can't become one of {len(tasks)}"
        )
    replays = "images" in whole.keeps.values() or type(whole).restore_data is not Method.restore_data
    if replays and max(whole.net.classes) > max(whole.net.classes[:count]):
        raise ValueError(
            f"{old.method} replays old tasks, and a new one has more classes than they: the logits of the old tasks would "
            "have been wider from the beginning, which rounds differently"
        )


def _grow(method: Method, whole: Method) -> None:
    """Make room in a method for all tasks of another one."""
    for classes in whole.net.classes[len(method.net.classes) :]:
        method.net.add_task(classes)
    method.make_room()


def _measured(
    path: Path, record: Record, spec: Run, tasks: Sequence[Task], method: Method, models: RunFolder | None
) -> tuple[dict[str, Any], int]:
    """Return what the longer run would have measured before its first new task, and how many of these numbers are missing.

    Afterwards the method has the state at the end of the finished run. `models` is where the models after the old tasks are
    written for the longer run; None: nowhere.
    """
    count = len(record.tasks)
    tests = [task.test for task in tasks[count:]]
    before = [score.accuracy for score in Evaluations(method, tests, wait=wait_for_gpu)()]
    rows: dict[str, list[Any]] = {"tests": [], "trains": [], "valids": []}
    missing = 0
    for number in range(count):
        found = task_model(path, number)
        last = number == count - 1
        if last:
            found = path.with_suffix(".safetensors")
        if not found.exists() and models:
            raise ValueError(f"{found} is missing, so that --keep-each can't keep the models after all tasks")
        scores: list[Any] = [(None, None)] * len(tests)
        if found.exists():
            _take_state(found, method, [task.name for task in tasks[: number + 1]])
            check_model(found, method, record, number, tasks)
            scores = list(Evaluations(method, tests, wait=wait_for_gpu)())
            if models:
                models.checkpointer.make_folder()
                save(method, models.task_model(number), **described_trunk(spec))
        else:
            missing += len(scores)
        rows["tests"].append([*_scores(record.loss, record.accuracy, number, count), *scores])
        losses = record.train_loss[number][: number + 1]
        rows["trains"].append([(loss, None) for loss in losses] + [(None, None)] * (len(tasks) - len(losses)))
        rows["valids"].append(_scores(record.valid_loss, record.valid_accuracy, number, number + 1))
    learn = record.seconds.learn or [0.0] * count
    others = {"before": [*record.before, *before], "seconds": learn, "usage": record.usage or [{}] * count}
    costs = record.costs.joules if record.costs else None
    spent = {"spent": record.seconds.total or 0.0, "parts": record.seconds.parts}
    return {**rows, **others, **spent, "joules": costs}, missing


def _scores(loss: Sequence[Any], accuracy: Sequence[Any], task: int, count: int) -> list[Any]:
    """Return the first scores of a row of two matrices, which an old record may lack."""
    return (
        list(zip(loss[task][:count], accuracy[task][:count], strict=True)) if loss and accuracy else [(None, None)] * count
    )


def _take_state(path: Path, method: Method, names: Sequence[str]) -> None:
    """Give a method the state of a saved model that has learned the first of its tasks."""
    kind = None if METHODS.get(METHODS.name_of(type(method))) else type(method)
    loaded = load(path, method=kind)  # on the CPU, from where its state is copied
    if list(loaded.history.values()) != list(names):
        raise ValueError(f"{path} has not learned the tasks {', '.join(map(repr, names))}: it is the model of another run")
    for task in loaded.router.tasks():  # it was fitted at the end, and a longer run fits it at its own end
        loaded.router.delete(task)
    _grow(loaded, method)
    try:
        method.load_state_dict(loaded.state_dict())
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit the longer run: {' '.join(str(error).split())}") from None
    method.history = dict(loaded.history)
    method.eval()


def _fits(record: Record) -> list[FitResult]:
    """Return the fits of a finished run. Their costs, of which a record has only the sums, are those of the first one."""
    engines = str(record.versions.get("engine", "eager")).split(" and ")
    fits = []
    for number, curve in enumerate(record.curves):
        epochs = [EpochResult(*point) for point in curve.epochs]  # type: ignore[arg-type]  # None: not finite
        engine = engines[min(number, len(engines) - 1)]
        score = record.tasks[curve.task].score
        fits.append(FitResult(curve.task, epochs, curve.best, engine, curve.halved, score=score))
        if record.costs:
            for name in ("steps", "examples", "flops", "peak_bytes"):
                total = getattr(record.costs, name)
                setattr(fits[-1], name, total if number == 0 or total is None or name == "peak_bytes" else 0)
    return fits
