"""The flatness of a run: it is measured from the models that the run kept after each task, and lies beside the record."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hatrack.experiments.build import build_tasks
from hatrack.experiments.record import Record
from hatrack.experiments.run_folder import task_model
from hatrack.experiments.spec import Run
from hatrack.files.atomic import writable, write
from hatrack.inspection.flatness import Flatness
from hatrack.inspection.flatness_measuring import Show
from hatrack.inspection.flatness_measuring import flatness as measure
from hatrack.methods import METHODS
from hatrack.training.saving import load

OPTIONS = {"images": 1000, "eigenvalues": 3, "points": 11}  # what is measured unless somebody asks for something else


def flatness_folder(record: Path) -> Path:
    """Return the folder of the results. No record lies in it: a folder of records has *.json files of records only."""
    return record.with_name(f"{record.stem}.flatness")


def check_models(path: Path, record: Record) -> None:
    """Raise an error in one line if the models of a record were not kept."""
    missing = [k for k in range(len(record.tasks)) if not task_model(path, k).exists()]
    if missing:
        raise ValueError(
            f"{task_model(path, missing[0])} is missing: hatrack run ... --keep-each keeps the model after each task"
        )


def measure_run(
    path: Path, record: Record, device: str, show: Show | None = None, own: Sequence[str] = (), **options: Any
) -> Flatness:
    """Measure the flatness of a run.

    Args:
        path: the file of its record.
        record: the record.
        device: "cpu" or "cuda".
        show: called with the share that is done and what is being measured.
        own: methods of the user's own, "module:class", that may be imported.
        options: images, eigenvalues and points: see `hatrack.inspection.flatness_measuring.flatness`.
    """
    spec = Run.from_spec(record.spec.written, own)
    if spec.name != record.name:
        raise ValueError(f"{path}: this version, or the present data, would make another run of it, with other tasks")
    kind = METHODS.find(spec.method) if ":" in spec.method else None
    models = [load(task_model(path, k), method=kind).to(device) for k in range(len(record.tasks))]
    return measure(models, build_tasks(spec, device), **options, progress=show)


def write_flatness(path: Path, record: Record, label: str, options: Mapping[str, Any], found: Flatness) -> None:
    """Write the flatness of a run beside its record.

    Args:
        path: the file of its record.
        record: the record.
        label: the name of the run in tables.
        options: how it was measured.
        found: what was measured.
    """
    values = {"record": record.name, "label": label, "options": dict(options), **found.to_dict()}
    write(writable(flatness_folder(path)) / "flatness.json", json.dumps(values, indent=1) + "\n")


def read_flatness(path: Path) -> Flatness | None:
    """Return the flatness of a run, given the file of its record; None if it was not measured."""
    file = flatness_folder(path) / "flatness.json"
    if not file.exists():
        return None
    try:
        return Flatness.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(f"{file} does not hold what hatrack flatness writes: delete it to measure again") from None
