"""What the file of a record may hold, field by field."""

from typing import Any

from hatrack.files import schema

SHARE = schema.number(0, 1, null=True)
LOSS = schema.number(-1e39, 1e39, null=True)  # beyond what float32 can hold
WHOLE = schema.number(0, 2**63, whole=True)
SECONDS = schema.number(0, 1e12)
OPTIONS = schema.table(schema.plain)
SPEC = schema.fields({
    "benchmark": schema.text,
    "method": schema.text,
    "network": schema.text,
    "seed": WHOLE,
    "regime": OPTIONS,
    "benchmark_options": OPTIONS,
    "network_options": OPTIONS,
    "method_options": OPTIONS,
})  # fmt: skip
REGIME = schema.fields({}, {"epochs": WHOLE, "schedule": schema.text})
TASK = schema.fields(
    {"name": schema.text, "classes": WHOLE}, {"train": WHOLE, "valid": WHOLE, "test": WHOLE, "score": schema.text}
)
PRETRAINING = schema.fields({"epochs": WHOLE}, {"valid_accuracy": SHARE})
COUNT = schema.number(0, 2**100, whole=True)
COSTS = schema.fields({}, {
    "bytes": schema.table(WHOLE), "peak_bytes": WHOLE, "steps": WHOLE, "examples": WHOLE, "flops": COUNT, "joules": SECONDS,
})  # fmt: skip
EXTENDED = schema.fields({"from": schema.text, "tasks": WHOLE, "missing": WHOLE})


def check_fields(data: dict[str, Any]) -> None:
    """Raise a ValueError that names the first field that has the wrong type or contradicts another field."""
    schema.items(TASK, least=1)("tasks", data["tasks"])
    count = len(data["tasks"])
    score = LOSS if any("score" in task for task in data["tasks"]) else SHARE  # a share of right answers, or any number
    epoch = schema.fields({"lr": LOSS, "loss": LOSS, "valid_loss": LOSS, "valid_accuracy": score})
    curve = {"task": schema.number(0, count - 1, whole=True), "best": WHOLE, "epochs": schema.items(epoch)}
    numbers, scores = schema.items(SHARE, count, what="numbers"), schema.items(score, count, what="numbers")
    whole = {
        "name": schema.text,
        "spec": SPEC,
        "parameters": WHOLE,
        "before": scores,
        "accuracy": schema.matrix(score, count),
        "loss": schema.matrix(LOSS, count),
        "train_loss": schema.matrix(LOSS, count),
        "without_task_id": numbers,
        "curves": schema.items(
            schema.fields(curve, {"halved": WHOLE, "watched": schema.items(scores), "used": schema.items(SHARE)})
        ),
        "seconds": schema.fields(
            {}, {"total": SECONDS, "learn": schema.items(SECONDS, count), "parts": schema.table(SECONDS)}
        ),
        "versions": OPTIONS,
    }
    usage = schema.items(schema.table(schema.number(0, null=True)), count if data.get("usage") else 0)
    added = {
        "usage": usage,
        "pretraining": PRETRAINING,
        "valid_accuracy": schema.matrix(score, count),
        "valid_loss": schema.matrix(LOSS, count),
        "routed": schema.fields({"kind": schema.text, "accuracy": numbers, "task": numbers}),
        "tuned": OPTIONS,
        "extended": EXTENDED,
        "models": schema.table(schema.text),
        "costs": COSTS,
        "weights_used": schema.fields({
            "tasks": schema.items(schema.text, count),
            "layers": schema.items(schema.fields({
                "name": schema.text, "title": schema.text, "weights": WHOLE, "used": numbers, "own": numbers,
                "shared_by": schema.items(WHOLE, count + 1),
            })),
            "used": numbers,
            "own": numbers,
            "reuse": schema.matrix(SHARE, count),
            "shared_by": schema.items(WHOLE, count + 1),
        }, {"frozen": numbers}),
    }  # fmt: skip
    schema.fields(whole, added)("", data)
    OPTIONS("spec", {key: value for key, value in data["spec"].items() if not isinstance(value, dict)})
    REGIME("spec.regime", data["spec"]["regime"])
    for index, found in enumerate(data["curves"]):
        schema.number(0, max(1, len(found["epochs"])) - 1, whole=True)(f"curves[{index}].best", found["best"])
        if "watched" in found:
            schema.items(numbers, len(found["epochs"]))(f"curves[{index}].watched", found["watched"])
        if "used" in found:
            schema.items(SHARE, len(found["epochs"]))(f"curves[{index}].used", found["used"])
