"""The bill of materials of a saved model in the machine-learning form of CycloneDX 1.6 (https://cyclonedx.org), plain JSON.

The same model and record give the same bill: it has no time, and its serial number follows from the model's file.
"""

import hashlib
import json
import platform
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hatrack._version import __version__
from hatrack.datasets.catalog import SETS
from hatrack.experiments.kept_models import END
from hatrack.experiments.record import Record
from hatrack.files.atomic import read_bytes, write
from hatrack.files.tensors import written_digest
from hatrack.methods import METHODS
from hatrack.methods.guarantees import digest
from hatrack.methods.method import Method
from hatrack.tasks.split import shape_text

VERSION = "1.6"  # of the schema
MODEL = "model"  # the reference of the model within the bill
DATA = {  # the data sets of the benchmarks; of a mixture they are the names of the tasks
    "cifar": ("cifar10", "cifar100"),
    "cifar10-5": ("cifar10",),
    "cifar100-5": ("cifar100",),
    "cifar100-20": ("cifar100",),
    "digits-and-clothes": ("mnist", "fashion-mnist"),
    "pmnist": ("mnist",),
    "pmnist-blocks": ("mnist",),
    "rmnist": ("mnist",),
    "smnist": ("mnist",),
}
Table = dict[str, Any]


def bill_of_materials(method: Method, model: Path, record: Record | None = None) -> Table:
    """Return the bill of materials of a model.

    Args:
        method: the method, as it was loaded from the file.
        model: the file of the model.
        record: the record of the run that made it, which knows the data sets and the accuracies; None if there is none.

    Returns:
        Plain values, valid by the JSON schema of CycloneDX 1.6: the model with its card, the digest of its file and of what
        each task uses, its data sets and the libraries that it needs.
    """
    sha256 = hashlib.sha256(read_bytes(model, most=None)).hexdigest()
    data, libraries = _data(record) if record else [], _libraries()
    name = record.name if record else model.stem
    component = {
        "type": "machine-learning-model",
        "bom-ref": MODEL,
        "name": name,
        "hashes": [_hash(sha256)],
        "modelCard": _card(method, record, data, written_digest(model)),
        "properties": _properties(method),
    }
    return {
        "$schema": f"http://cyclonedx.org/schema/bom-{VERSION}.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": VERSION,
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, sha256)}",
        "version": 1,
        "metadata": {
            "tools": {"components": [{"type": "application", "name": "hatrack", "version": __version__}]},
            "component": component,
        },
        "components": [*data, *libraries],
        "dependencies": [{"ref": MODEL, "dependsOn": [part["bom-ref"] for part in (*data, *libraries)]}],
    }


def _card(method: Method, record: Record | None, data: list[Table], digest_of_file: str) -> Table:
    """Return the model card: what the model takes and gives, how it was made, and, if the record is of this model, how well
    it does."""
    net = method.net
    names = method.history
    card: Table = {
        "modelParameters": {
            "approach": {"type": "supervised"},
            "task": "classification",
            "architectureFamily": record.spec.network if record else type(net.trunk).__name__,
            "modelArchitecture": repr(net),
            "datasets": [{"ref": part["bom-ref"]} for part in data],
            "inputs": [{"format": f"{shape_text(net.example.shape[1:])}, and the number of a task"}],
            "outputs": [{"format": f"{net.classes[task]} classes of task {task}, {name}"} for task, name in names.items()],
        }
    }
    own = record and record.models.get(END, digest_of_file) == digest_of_file
    if record and own and [task.name for task in record.tasks] == list(names.values()):
        accuracies = {
            name: value for name, value in zip(names.values(), record.accuracy[-1], strict=True) if value is not None
        }
        kind = "accuracy on test data"
        metrics = [{"type": kind, "value": f"{value:.6f}", "slice": name} for name, value in accuracies.items()]
        card["quantitativeAnalysis"] = {"performanceMetrics": metrics}
    return card


def _properties(method: Method) -> list[Table]:
    """Return the method, its options, and the name of every finished task with the digest of all that it uses."""
    found = {"method": METHODS.name_of(type(method)), "options": json.dumps(method.options, sort_keys=True)}
    found["parameters"] = str(method.num_parameters())
    for task, name in method.history.items():
        found[f"task:{task}:name"] = name
        if used := digest(method, task):  # empty for a method that does not guarantee finished tasks
            found[f"task:{task}:sha256"] = used
    return [_property(name, value) for name, value in found.items()]


def _data(record: Record) -> list[Table]:
    """Return the data sets of a run as components, each with its digest if that is known."""
    spec = record.spec
    if spec.benchmark == "own":
        return [_data_set("own", "tasks of the user's own files", spec.data_digest or "")]
    names = DATA.get(spec.benchmark, tuple(task.name for task in record.tasks if task.name in SETS))
    if spec.benchmark_options.get("data") == "sample":
        return [_data_set(name, f"{SETS[name].title}: the sample that comes with hatrack", "") for name in names]
    return [_data_set(name, SETS[name].title, SETS[name].digest, SETS[name].licence, SETS[name].home) for name in names]


def _data_set(name: str, text: str, sha256: str, licence: str = "", home: str = "") -> Table:
    found: Table = {"type": "data", "bom-ref": f"data:{name}", "name": name, "description": text}
    if sha256:  # of the arrays, see `datasets/cache.py`, or of a task file and its data
        found["hashes"] = [_hash(sha256)]
    if licence:
        found["licenses"] = [{"license": {"name": licence}}]
    if home:
        found["externalReferences"] = [{"type": "website", "url": home}]
    return found


def _libraries() -> list[Table]:
    """Return what is needed to run the model."""
    found = {"hatrack": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    kinds = {"python": "platform"}
    return [
        {"type": kinds.get(name, "library"), "bom-ref": f"{name}@{version}", "name": name, "version": version}
        for name, version in found.items()
    ]


def _hash(sha256: str) -> Table:
    return {"alg": "SHA-256", "content": sha256}


def _property(name: str, value: str) -> Table:
    return {"name": f"hatrack:{name}", "value": value}


def save_bill(found: Mapping[str, Any], path: Path) -> None:
    """Write a bill of materials to a JSON file, whole or not at all; another kind of file is not replaced."""
    if path.exists():
        try:
            old = json.loads(read_bytes(path).decode())
        except (ValueError, RecursionError):
            old = None
        if not isinstance(old, dict) or old.get("bomFormat") != "CycloneDX":
            raise ValueError(f"{path} is not a bill of materials in the form of CycloneDX, so it is not replaced")
    write(path, json.dumps(found, indent=1) + "\n", follow=False)
