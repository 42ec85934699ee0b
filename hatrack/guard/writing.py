"""The file of a guard: the backbone with all that tasks have learned in it, and the tasks' own modules; never a pickle."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hatrack._version import __version__
from hatrack.files import tensors as tensor_files
from hatrack.guard.finished import Finished
from hatrack.guard.soft_gates import Gated
from hatrack.methods import METHODS

KIND, FORMAT = "guard", 1
FIELDS = {"method": str, "options": dict, "seed": int, "numbers": int, "stopped": list, "tasks": list, "versions": dict}


def write(path: Path, method: Gated, tasks: Mapping[str, Finished]) -> None:
    """Write the file of a guard. The backbone must be bare.

    Args:
        path: the file; it is written whole or not at all.
        method: HAT or PMASK on the backbone.
        tasks: the finished tasks.
    """
    found = {f"state.{name}": value for name, value in method.state_dict().items() if name not in method.transient}
    hidden = {name for name, _ in method.net.trunk.named_buffers()} - method.net.trunk.state_dict().keys()
    if lost := sorted(hidden.intersection(method.norms.names)):
        raise ValueError(f"training changes the buffer {lost[0]!r}, and no file holds it: register it with persistent=True")
    for task in tasks.values():
        found |= {f"own.{task.number}.{name}": value for name, value in task.sealed.values.items()}
        found[f"answers.{task.number}"] = task.answers
    metadata = {
        "kind": KIND,
        "format": FORMAT,
        "method": METHODS.name_of(type(method)),
        "options": method.options,
        "seed": method.net.seed,
        "numbers": len(method.net.classes),  # of tasks, with 0 and those that were released
        "stopped": method.built[1],  # parameters that required no gradient when the backbone was protected
        "tasks": [{"name": name, "number": task.number, "digest": task.digest} for name, task in tasks.items()],
        "versions": {"hatrack": __version__, "torch": torch.__version__},
    }
    tensor_files.save(path, {**found, "example": method.net.example}, metadata)


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the metadata of a file, after checking all parts that are used later."""
    tensors, metadata, wrong = tensor_files.load_kind(path, KIND, FORMAT, FIELDS, "guard.save")
    if not wrong and not _tasks_are_right(tensors, metadata):
        wrong = ["tasks"]
    if wrong or "example" not in tensors:
        raise ValueError(f"{path} holds no whole guard: {', '.join(wrong) or 'example'} missing or wrong")
    return tensors, metadata


def _tasks_are_right(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> bool:
    """Return whether the list of tasks fits the tensors, so that a wrong number can't make us allocate memory."""
    tasks, done = metadata["tasks"], tensors.get("state.done")
    if done is None or metadata["numbers"] != len(done) or not all(isinstance(task, dict) for task in tasks):
        return False
    numbers, names = [task.get("number") for task in tasks], [task.get("name") for task in tasks]
    right = [
        type(number) is int and 1 <= number < len(done) and f"answers.{number}" in tensors and isinstance(name, str)
        for number, name in zip(numbers, names, strict=True)
    ]
    digests = all(isinstance(task.get("digest"), str) for task in tasks)
    return all(right) and digests and len(set(numbers)) == len(set(names)) == len(tasks)
