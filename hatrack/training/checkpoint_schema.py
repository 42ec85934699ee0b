"""What a saved state may hold. Its digest tells of accidents; this of files that somebody made."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hatrack.files import schema
from hatrack.files.tensors import differences

WHOLE = schema.number(0, 2**40, whole=True)
COUNT = schema.number(0, 2**100, whole=True)
LOSS = schema.number(-1e39, 1e39, finite=False, null=True)
SECONDS = schema.number(0, 1e11)
SHARE = schema.number(0, 1, null=True)
SCORE = LOSS  # the accuracy, or another score, which may be any number; a record is checked again when it is made
# The keys of the format are older than the names in the code: "pace" is the schedule, "fitted" the result of a fit so far,
# "place" the number of steps done in the present epoch.
PACE = schema.fields(
    {
        "lr": schema.number(0),
        "patience": schema.number(whole=True),
        "lowest": schema.number(finite=False),
        "over": schema.flag,
    },
    closed=True,
)


def check_metadata(kind: str, metadata: Mapping[str, Any]) -> None:
    """Raise an error that names what is wrong in the metadata of a state, of the beginning of a task or of a fit."""
    if kind == "fit":
        known = {"fitted": _fitted, "pace": PACE, "place": WHOLE, "saves": WHOLE, "ended": schema.flag}
        schema.fields(known, {"flops": _flops})("", metadata)
    else:
        rows = metadata.get("rows")
        before = rows.get("before") if isinstance(rows, dict) else None
        _task(metadata.get("task"), len(before) if isinstance(before, list) else 0)("", metadata)


def _fitted(where: str, value: Any, tasks: int = 2**40) -> None:
    task = schema.number(0, tasks - 1, whole=True)
    schema.fields(
        {"task": task, "epochs": schema.items(_epoch), "best": WHOLE, "engine": schema.line, "halved": WHOLE},
        {
            "watched": schema.items(schema.items(SCORE)),
            "used": schema.items(SHARE),
            "score": schema.line,
            **dict.fromkeys(("steps", "examples", "flops", "peak_bytes"), COUNT),
        },
        closed=True,
    )(where, value)
    if "watched" in value:
        schema.items(schema.items(SCORE), len(value["epochs"]))(f"{where}.watched", value["watched"])
    if "used" in value:
        schema.items(SHARE, len(value["epochs"]))(f"{where}.used", value["used"])
    schema.number(0, max(1, len(value["epochs"])) - 1, whole=True)(f"{where}.best", value["best"])


def _flops(where: str, value: Any) -> None:
    """Operations of a step by the size of its batch."""
    schema.table(COUNT)(where, value)
    for size in value:
        if not size.isdecimal() or len(size) > 12:
            raise schema.wrong(where, "counts by the size of a batch", value)


def _epoch(where: str, value: Any) -> None:
    """Learning rate, loss, and loss and accuracy on validation data."""
    schema.items(LOSS, 4)(where, value)
    SCORE(f"{where}[3]", value[3])


def _score(where: str, value: Any) -> None:
    """Loss and accuracy."""
    schema.items(LOSS, 2)(where, value)
    SCORE(f"{where}[1]", value[1])


def _task(done: Any, tasks: int) -> schema.Check:
    """When so many of the tasks are done."""
    done = done if type(done) is int else 0
    scores = schema.items(schema.items(_score, tasks), done)
    rows = {
        "before": schema.items(SCORE),
        "tests": scores,
        "trains": scores,
        "seconds": schema.items(SECONDS, done),
        "usage": schema.items(schema.table(schema.number(0, finite=False, null=True)), done),
        "spent": SECONDS,
    }

    def counts(where: str, value: Any) -> None:
        schema.table(WHOLE)(where, value)
        for name in value:
            if not name.isdecimal() or len(name) > 9:
                raise schema.wrong(where, "counts by the number of a task", value)

    def named(where: str, value: Any) -> None:
        schema.items(lambda *_: None, 2)(where, value)
        schema.number(0, tasks - 1, whole=True)(f"{where}[0]", value[0])
        schema.text(f"{where}[1]", value[1])

    measured = schema.fields(rows, {"joules": schema.number(0, 1e12, null=True)})
    return schema.fields({
        "task": schema.number(0, tasks - 1, whole=True),
        "rows": measured,
        "history": schema.items(named),
        "counts": counts,
        "fits": schema.items(lambda where, value: _fitted(where, value, tasks)),
    })  # fmt: skip


def misfit(tensors: Mapping[str, Tensor], fresh: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> str:
    """Why these tensors can't be a state of the fit whose first state is `fresh`; empty if they can."""
    known = {name: value for name, value in fresh.items() if not name.startswith("optimizer/")}
    own = {name: value for name, value in tensors.items() if name in known or name.startswith("method/")}
    known = {name: value for name, value in known.items() if name in own or name != "random/cuda"}
    wrong = differences(known, own)
    for name, value in tensors.items():
        group, _, rest = name.partition("/")
        if group == "best" and differences({name: fresh.get(f"method/{rest}", value.new_zeros(0))}, {name: value}):
            wrong = wrong or f"{name} is not like the method's"
        if group == "optimizer":
            weight = weights.get(rest.rpartition("/")[0])
            if weight is None or (value.dim() and value.shape != weight.shape):
                wrong = wrong or f"{name} belongs to no weight"
    return wrong or _not_random(tensors["random/cpu"])


def _not_random(state: Tensor) -> str:
    try:
        torch.Generator().set_state(state)
    except (RuntimeError, TypeError):
        return "random/cpu is no state of a generator"
    return ""
