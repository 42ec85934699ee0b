"""Certifying models and verifying them. Imported when one of the commands begins: it needs torch."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

from hatrack.cli.trunks import load_model, own_trunk
from hatrack.experiments.bill_of_materials import bill_of_materials, save_bill
from hatrack.experiments.kept_models import is_model_of
from hatrack.experiments.record import Record
from hatrack.files.atomic import read_bytes
from hatrack.files.tensors import written_kind
from hatrack.guard.protect import load_guard
from hatrack.guard.writing import KIND as GUARD
from hatrack.methods.certificate import Comparison, compare_certificates, load_certificate, save_certificate
from hatrack.text import say


def certify(model: Path, kind: str, out: Path, trunk: str, method: str) -> None:
    """Write the certificate of a saved model, or its bill of materials.

    Args:
        model: the file of the model.
        kind: "certificate" or "cyclonedx".
        out: the file to write.
        trunk: the place of a function that makes its trunk, "module:name"; "" if the file says it.
        method: the place of the class of its method, if it is the user's own.
    """
    if kind == "cyclonedx":
        loaded = load_model(model, trunk, method)
        beside = model.with_suffix(".json")
        record = Record.load(beside) if beside.exists() else None
        if record and not is_model_of(model, loaded, record):
            say(f"{beside} is the record of another model, or this can't be told: the bill has nothing of it")
            record = None
        save_bill(bill_of_materials(loaded, model, record), out)
        say(f"the bill of materials of {model} is in {out}")
        return
    found = _certificate_of_model(model, trunk, method)
    if out.exists():
        load_certificate(out)  # an error if it is another file
    save_certificate(found, out)
    say(f"{len(found['tasks'])} {'task' if len(found['tasks']) == 1 else 'tasks'} certified in {out}")


def verify(new: Path, against: Path, trunk: str, method: str) -> int:
    """Compare a model with an earlier one, or with its certificate, task by task.

    Args:
        new: the later model, or its certificate.
        against: the earlier model, or its certificate.
        trunk: the place of a function that makes the trunk of models, "module:name"; "" if the files say it.
        method: the place of the class of their method, if it is the user's own.

    Returns:
        The exit code: 0 if every old task is there and unchanged, 1 if not.
    """
    found = compare_certificates(*(_certificate(path, trunk, method) for path in (new, against)))
    for line in lines(found):
        say(line)
    return 0 if found.kept else 1


def lines(found: Comparison) -> list[str]:
    """Return what a comparison came to: a line per task, changes first."""
    words = {"changed": found.changed, "missing": found.missing, "unchanged": found.same, "added since": found.added}
    return [f"{word}: task {name!r}" for word, names in words.items() for name in names]


def _certificate(path: Path, trunk: str, method: str) -> dict[str, Any]:
    """Return the certificate in a file, or of the model in it, whose digests are computed anew from its tensors."""
    if path.suffix == ".safetensors" or read_bytes(path, most=None)[8:9] == b"{":  # behind the size of its header
        return _certificate_of_model(path, trunk, method)
    return load_certificate(path)


def _certificate_of_model(path: Path, trunk: str, method: str) -> dict[str, Any]:
    """Return the certificate of what a file holds: a model, or the guard of a user's own loop."""
    if written_kind(path) != GUARD:
        return load_model(path, trunk, method).certificate()
    if (backbone := own_trunk(trunk)) is None:
        raise ValueError(f"{path} holds a guard: --trunk MODULE:FUNCTION makes its backbone")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* has modules of the task")  # their values are in the file
        trained = list(backbone.parameters()) or [nn.Parameter(torch.zeros(0))]  # without any, `load_guard` says so
        return load_guard(path, backbone, SGD(trained, lr=0.0)).certificate()
