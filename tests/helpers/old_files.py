"""Files of earlier versions, which later ones must be able to read: tests/data, written once per format and then left alone.

`python -m tests.helpers.old_files` writes those of the present formats that are not there yet: a model of every method after
two tasks, and a run of three tasks that was killed in its second, with the record that it comes to.
"""

import tempfile
import time
import warnings
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from hatrack import METHODS, Method, Network, Record, Regime, Run, Task, Trainer
from hatrack.experiments import record
from hatrack.experiments.run import _run
from hatrack.networks.mlp import mlp
from hatrack.seeds import seeded
from hatrack.training import checkpoint, saving
from hatrack.training.checkpoint import Checkpointer
from hatrack.training.saving import save
from tests.helpers.toys import toy_tasks

DATA = Path(__file__).parent.parent / "data"
OPTIONS = {  # where the defaults would make large files
    "er": {"memory": 4},
    "derpp": {"memory": 4},
    "agem": {"per_class": 2},
    "den": {"room": 4, "expand": 2},
    "pathnet": {"modules": 3, "active": 2, "generations": 2},
}
SPEC = {"made by": "tests/old_files.py"}
STEPS = 8  # in the second task, before the kill


def tasks() -> list[Task]:
    return toy_tasks(3, classes=2, shape=(1, 2, 2), train=24, test=12)


def trunk(norms: bool = False) -> nn.Module:
    with seeded(0, "trunk"):
        if norms:
            return nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU())
        return mlp((1, 2, 2), widths=(5, 4), dropout=0.0, input_dropout=0.0)


def trainer() -> Trainer:
    return Trainer(Regime(epochs=4, batch=8, optimizer="momentum", lr=0.05, keep_state=True))


def method(name: str, known: int) -> Method:
    kind = name.removesuffix("-norms")
    example = tasks()[0].train.inputs(torch.arange(2))
    return METHODS[kind](Network(trunk(norms=kind != name), [2] * known, example), **OPTIONS.get(kind, {}))


def names() -> list[str]:
    return [*METHODS, "hat-norms"]


def make_models(folder: Path) -> None:
    for name in names():
        path = folder / f"{name}.safetensors"
        if not path.exists():
            made = method(name, known=2)
            for task in tasks()[:2]:
                made.learn(task, trainer())
            save(made, path)
            print(f"wrote {path}")


def carry_on(folder: Path, spec: dict[str, str], steps: int = 0) -> Record:
    """The run from where its states in this folder stand, to its end or for so many steps of its second task."""
    fit, done = trainer(), []
    fit.checkpointer = checkpointer = Checkpointer(folder, spec)

    def tick(course):
        done.append(course.task.index)
        if steps and done.count(1) == steps:
            checkpointer.save_fit(course)
            checkpointer.wait()
            raise KeyboardInterrupt

    checkpointer.after_step = tick
    return _run(Run("smnist", "hat"), tasks(), method("hat", known=3), fit, time.perf_counter())


def make_run(folder: Path) -> None:
    if not list(folder.iterdir()):
        with suppress(KeyboardInterrupt):
            carry_on(folder / "killed.part", SPEC, STEPS)
        with tempfile.TemporaryDirectory() as place:
            print(f"wrote {carry_on(Path(place) / 'whole.part', SPEC).save(folder)} and the states beside it")


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    formats = {make_models: f"models-{saving.FORMAT}", make_run: f"run-{checkpoint.FORMAT}-{record.SCHEMA}"}
    for make, name in formats.items():
        (DATA / name).mkdir(parents=True, exist_ok=True)
        make(DATA / name)


if __name__ == "__main__":
    main()
