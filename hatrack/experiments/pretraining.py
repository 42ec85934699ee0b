"""Pretraining: before the sequence, the trunk is trained on a data set whose head is dropped afterwards.

The trained trunk is kept in the folder of the run, so that a run that is continued does not train it again. While it is
being trained nothing is saved: a run that is killed then starts the pretraining anew.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from hatrack.benchmarks.whole_set import whole_set
from hatrack.engine.choice import Engine
from hatrack.experiments.build import build_trunk
from hatrack.experiments.record_parts import Pretraining
from hatrack.experiments.record_schema import PRETRAINING
from hatrack.experiments.run_folder import TRUNK, RunFolder
from hatrack.experiments.spec import Run
from hatrack.files import tensors as tensor_files
from hatrack.methods.method import Method
from hatrack.networks.network import Network
from hatrack.seeds import derive
from hatrack.tasks.device import to_device
from hatrack.tasks.task import Task
from hatrack.tracking.log import EpochLog
from hatrack.training.checkpoint import Stopped, stopping
from hatrack.training.fit_loop import FitLoop
from hatrack.training.progress import Progress, ProgressEvent
from hatrack.training.trainer import Trainer


class Pretrained(NamedTuple):
    """A trained trunk, and the result of its training, for the record."""

    trunk: nn.Module
    result: Pretraining


class PretrainingTrainer(Trainer):
    """A trainer without checkpoints that can be stopped at every step all the same."""

    def start(self, *args: Any, **options: Any) -> FitLoop:
        """Prepare a fit that ends as soon as the program is asked to stop."""
        loop = super().start(*args, **options)
        loop.after_step = _stop_if_asked
        return loop


def _stop_if_asked(loop: FitLoop) -> None:
    if stopping.is_set():
        raise Stopped(f"stopped in the {loop.task.name}, which is not saved")


def pretraining_task(spec: Run, tasks: Sequence[Task]) -> Task | None:
    """Return the task of the pretraining of a run; None if it has none.

    Args:
        spec: the run.
        tasks: the tasks of its benchmark.
    """
    data = str(spec.benchmark_options.get("data", "full"))
    return whole_set(spec.pretrain, tasks, data=data, seed=spec.seed) if spec.pretrain else None


def pretrained_trunk(
    spec: Run,
    tasks: Sequence[Task],
    first: Task,
    folder: RunFolder | None,
    *,
    device: torch.device | str,
    engine: Engine,
    progress: Progress | None,
    log: EpochLog | None = None,
) -> Pretrained:
    """Return the pretrained trunk of a run: from the run's folder if the run is continued, else trained now.

    Args:
        spec: the run.
        tasks: the tasks of its benchmark.
        first: the task of the pretraining.
        folder: the files of the run; None to keep nothing.
        device, engine, progress: as in `run`.
        log: takes a line after every epoch, for task -1.
    """
    trunk = build_trunk(spec, tasks)
    result = load(folder.path, spec, trunk) if folder else None
    if result is None:
        trained = build_trunk(spec, tasks)
        show = (lambda event: progress(event._replace(tasks=len(tasks)))) if progress else None
        result = pretrain(spec, trained, first, device=device, engine=engine, progress=show, log=log)
        trunk.load_state_dict(trained.state_dict())
        if folder:
            folder.checkpointer.make_folder()
            save(folder.path, spec, Pretrained(trunk, result))
    return Pretrained(trunk, result)


def pretrain(
    spec: Run,
    trunk: nn.Module,
    task: Task,
    *,
    device: torch.device | str,
    engine: Engine,
    progress: Progress | None,
    log: EpochLog | None = None,
) -> Pretraining:
    """Train a trunk on a task by plain SGD and the regime of a run.

    Args:
        spec: the run.
        trunk: the trunk with its initial weights; it is trained in place.
        task: the task, see `whole_set`.
        device: where to train.
        engine: how steps run.
        progress: called after every epoch; its event has the task number -1.
        log: takes a line after every epoch, for task -1.

    Returns:
        The number of epochs and the accuracy on validation data.
    """
    task = to_device(task, device)
    example = task.train.inputs(torch.arange(min(2, len(task.train)), device=task.train.y.device))
    net = Network(trunk.to(device), [task.classes], example, init=spec.init, seed=spec.seed)
    regime = spec.regime
    if spec.pretrain_epochs:
        regime = replace(regime, epochs=spec.pretrain_epochs, steps=0)

    def show(event: ProgressEvent) -> None:
        if log:
            log.epoch(-1, 0, event.regime.epochs, event.result)
        if progress:
            progress(event._replace(task=replace(task, index=-1)))

    trainer = PretrainingTrainer(regime, seed=derive(spec.seed, "pretraining"), progress=show, engine=engine)
    found = Method(net).learn(task, trainer)
    return Pretraining(found.epochs, found.valid_accuracy)


def save(folder: Path, spec: Run, pretrained: Pretrained) -> None:
    """Write a trained trunk to the folder of its run, which exists."""
    path = folder / TRUNK
    try:
        metadata = {"spec": spec.spec, **pretrained.result.to_dict()}
        tensor_files.save(path, pretrained.trunk.state_dict(), metadata, state=True)
    except OSError as error:
        raise ValueError(f"can't save to {path}: {error.strerror}") from None


def load(folder: Path, spec: Run, trunk: nn.Module) -> Pretraining | None:
    """Load the trained trunk in the folder of a run.

    Args:
        folder: the folder.
        spec: the run.
        trunk: an untrained trunk, which gets the trained weights.

    Returns:
        The result of its training; None if there is no file that can be used, and then the trunk is not changed.
    """
    try:
        state, metadata = tensor_files.load(folder / TRUNK)
        PRETRAINING("", metadata)
    except (OSError, ValueError):
        return None
    if metadata.get("spec") != spec.spec or tensor_files.differences(trunk.state_dict(), state):
        return None
    trunk.load_state_dict(state)
    return Pretraining.from_dict(metadata)
