"""Many invented records: any number of methods, seeds and tasks, with curves and masks, to see pages of real size."""

import numpy as np

from hatrack.experiments.record import Record
from hatrack.experiments.record_parts import Curve, CurvePoint, Seconds, Spec, TaskInfo
from hatrack.experiments.run import Run
from hatrack.regime import Regime

METHODS = (
    *("sgd", "hat", "ewc", "pmask", "packnet", "lwf", "er", "derpp", "agem", "si", "mas", "imm-mean", "imm-mode", "lfl"),
    *("pnn", "pathnet", "independent", "frozen", "stable-sgd", "den", "joint", "random"),
)
MASKS = ("hat", "pmask", "packnet")


def many(methods: int = 20, seeds: int = 10, tasks: int = 20, *, epochs: int = 10, **spec: object) -> list[Record]:
    """Return a record for every method and seed; the same numbers give the same records."""
    return [one(METHODS[k], seed, tasks, epochs, **spec) for k in range(methods) for seed in range(seeds)]


def settings_of(count: int, **sizes: int) -> list[Record]:
    """Return the records of several settings, which differ in the learning rate."""
    return [record for k in range(count) for record in many(**sizes, regime=Regime(lr=0.01 * (k + 1)))]  # type: ignore[arg-type]


def one(method: str, seed: int, tasks: int, epochs: int = 10, **spec: object) -> Record:
    """Return a record in which accuracy falls as the method's place in METHODS says."""
    run = Run("digits-and-clothes", method, seed, **spec)  # type: ignore[arg-type]
    draw = np.random.default_rng([METHODS.index(method), seed, tasks])
    loss = 0.0 if method in (*MASKS, "pnn", "independent", "frozen", "pathnet") else 0.004 * METHODS.index(method) + 0.01
    learned = 0.97 - 0.01 * METHODS.index(method) % 0.2 + 0.01 * draw.standard_normal(tasks)
    table = np.full((tasks, tasks), 0.33) + 0.02 * draw.standard_normal((tasks, tasks))
    for i in range(tasks):
        table[i:, i] = learned[i] - loss * np.arange(tasks - i)
    table = table.clip(0, 1).round(4)
    curve = [CurvePoint(0.05, 1 / (e + 1), 1.0, round(float(0.9 - 0.5 / (e + 1)), 4)) for e in range(epochs)]
    return Record(
        name=run.name,
        spec=Spec.from_dict(run.spec),
        tasks=[TaskInfo(f"task {k + 1}", 3, 1000, 200, 300) for k in range(tasks)],
        parameters=100_000 + 7_000 * METHODS.index(method),
        before=[0.33] * tasks,
        accuracy=table.tolist(),
        loss=(1 - table).tolist(),
        train_loss=(1 - table).tolist(),
        without_task_id=[0.5] * tasks,
        curves=[] if method == "random" else [Curve(k, epochs - 1, curve) for k in range(tasks)],
        seconds=Seconds(total=60.0 + seed, learn=[3.0] * tasks),
        versions={"hatrack": "0.1.0", "torch": "2.13.0", "device": "cpu"},
        weights_used=_weights(tasks) if method in MASKS else {},
    )


def _weights(tasks: int) -> dict[str, object]:
    used = [1 - 0.85 ** (k + 1) for k in range(tasks)]
    own = [0.15 + 0.01 * (k % 3) for k in range(tasks)]
    reuse = [[1.0 if i == j else 0.4 for j in range(tasks)] for i in range(tasks)]
    shared = [100] * (tasks + 1)
    layers = [
        {"name": f"{k}.weight", "title": f"layer {k}", "weights": 1000, "used": used, "own": own, "shared_by": shared}
        for k in range(4)
    ]
    return {
        "tasks": [f"task {k + 1}" for k in range(tasks)],
        "layers": layers,
        "used": used,
        "own": own,
        "reuse": reuse,
        "shared_by": shared,
    }
