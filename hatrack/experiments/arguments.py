"""Checks of the arguments of `run`."""

import json
import os
from collections.abc import Mapping
from typing import Any

import torch

from hatrack.experiments.spec import Run
from hatrack.files import schema
from hatrack.options import expect


def check_arguments(spec: Any, out: Any, device: Any, save_every: Any, progress: Any, after_task: Any) -> None:
    """Raise a ValueError for the first argument of `run` that is of a wrong kind."""
    expect("spec", spec, Run, "a Run, such as Run('smnist', 'hat')")
    expect("out", out, str | os.PathLike | None, "the path of a folder, or None")
    if isinstance(save_every, bool) or not isinstance(save_every, int | float) or not save_every >= 0:
        raise ValueError(f"save_every (--save-every) must be a number of minutes from 0, not {save_every!r}")
    for name, function in {"progress": progress, "after_task": after_task}.items():
        if function is not None and not callable(function):
            raise ValueError(f"{name} must be a callable or None, not {function!r}")
    check_device(device)


def check_note(tuned: Any) -> None:
    """Raise a ValueError if a record can't hold this as its field `tuned`: a table of names and plain values, or None."""
    if tuned is not None:
        schema.table(schema.plain)("tuned", dict(tuned) if isinstance(tuned, Mapping) else tuned)
        json.dumps(dict(tuned), allow_nan=False)


def check_device(device: Any) -> None:
    """Raise a ValueError if there is no such device, or runs can't use it."""
    expect("device", device, str | torch.device, "'cpu' or 'cuda'")
    try:
        kind = torch.device(device).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'cpu' or 'cuda', not {str(device)!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda': no GPU that torch can use was found; 'cpu' works everywhere")
