"""The models that a run keeps beside its record: their digests, and whether a file is the model of a record."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from hatrack.engine.interleaving import wait_for_gpu
from hatrack.experiments.build import build_tasks
from hatrack.experiments.record import Record
from hatrack.experiments.run_folder import task_model
from hatrack.experiments.spec import Run
from hatrack.files.tensors import written_digest
from hatrack.methods.evaluate import Evaluations
from hatrack.methods.method import Method
from hatrack.tasks.task import Task

END = "end"  # the model at the end of a run; "task-1" is that after its first task
NEAR, EQUAL = 0.02, 1e-6  # by how much results may differ that were measured on another machine, or on this one


def kept_models(record: Path, tasks: int) -> dict[str, str]:
    """Return the digests of the models beside a record, for its field `models`.

    Args:
        record: the file of the record; it need not be there yet.
        tasks: the number of tasks after which the model was kept; 0: only that at the end.
    """
    files = {END: record.with_suffix(".safetensors")}
    files |= {f"task-{number + 1}": task_model(record, number) for number in range(tasks)}
    return {name: found for name, file in files.items() if (found := written_digest(file))}


def is_model_of(model: Path, method: Method, record: Record) -> bool:
    """Return whether a model at the end of a run is the one that a record is of.

    Args:
        model: the file.
        method: the method that was loaded from it.
        record: the record. If it is of a version that kept no digests, results on test data are compared with it.
    """
    if END in record.models:
        return written_digest(model) == record.models[END]
    device = method.net.example.device
    try:
        tasks = build_tasks(Run.from_spec(record.spec.written), device)
    except (ValueError, TypeError, KeyError, AttributeError):  # of another version, or its data are not here
        return False
    return _fits(method, tasks, record, exact=_same_machine(record, device))


def check_model(model: Path, method: Method, record: Record, number: int, tasks: Sequence[Task]) -> None:
    """Raise a ValueError in one line unless a file is the model of a run after one of its tasks.

    Args:
        model: the file.
        method: a method with the state of the model.
        record: the record of the run. If it is of a version that kept no digests, results on test data are compared.
        number: the number of the task, which counts from 0.
        tasks: the tasks of the run.
    """
    name = END if number == len(record.tasks) - 1 else f"task-{number + 1}"
    if name in record.models:
        if written_digest(model) != record.models[name]:
            raise ValueError(f"{model} is not the model that {record.name} kept: its digest differs from that in the record")
    elif not _fits(method, tasks[: number + 1], record, exact=_same_machine(record, method.net.example.device)):
        raise ValueError(f"{model} is not the model of {record.name}: its results on test data differ from the record's")


def _fits(method: Method, tasks: Sequence[Task], record: Record, *, exact: bool) -> bool:
    """Return whether a method has learned these tasks, and has the test results of the record after the last of them."""
    known = [task.name for task in record.tasks[: len(tasks)]]
    if not known == list(method.history.values()) == [task.name for task in tasks]:
        return False
    now = list(Evaluations(method, [task.test for task in tasks], wait=wait_for_gpu)())
    losses, accuracies = (rows[len(tasks) - 1][: len(tasks)] for rows in (record.loss, record.accuracy))
    pairs = [*zip((s.loss for s in now), losses, strict=True), *zip((s.accuracy for s in now), accuracies, strict=True)]
    share = EQUAL if exact else NEAR
    return all(abs(a - b) <= share * max(1, abs(b)) for a, b in pairs if b is not None and math.isfinite(a))


def _same_machine(record: Record, device: torch.device) -> bool:
    """Return whether a record was measured as it would be now, so that results are equal and not only near."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    now = {"torch": torch.__version__, "device": kind, "threads": torch.get_num_threads()}
    return all(record.versions.get(name) == value for name, value in now.items())
