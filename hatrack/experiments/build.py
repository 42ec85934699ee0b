"""Make the tasks, the trunk and the untrained method of a run."""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hatrack.benchmarks import BENCHMARKS
from hatrack.experiments.spec import Run
from hatrack.methods import METHODS
from hatrack.methods.method import Method
from hatrack.networks import NETWORKS
from hatrack.networks.adapters import lora
from hatrack.networks.freezing import freeze_all
from hatrack.networks.initial_weights import initialise
from hatrack.networks.network import Network
from hatrack.networks.weights import load_weights
from hatrack.options import nearest
from hatrack.seeds import seeded
from hatrack.tasks.device import all_to_device
from hatrack.tasks.scenario import in_scenario
from hatrack.tasks.task import Task


def build(spec: Run, device: torch.device | str = "cpu") -> tuple[list[Task], Method]:
    """Make the tasks and the untrained method of a run. The trunk has its initial weights, not those of a pretraining."""
    tasks = build_tasks(spec, device)
    return tasks, build_method(spec, tasks, build_trunk(spec, tasks), device)


def build_tasks(spec: Run, device: torch.device | str) -> list[Task]:
    """Make the tasks of a run."""
    sequence = BENCHMARKS[spec.benchmark]
    alone = (
        {"only": spec.only_task} if "only" in inspect.signature(sequence).parameters else {}
    )  # it need not load the others
    tasks = sequence(spec.seed, **spec.benchmark_options, **alone)
    if spec.only_task:
        tasks = [_find(tasks, spec.only_task, spec.benchmark)]
    if spec.first_tasks > len(tasks):
        raise ValueError(f"first_tasks (--first-tasks) must be at most {len(tasks)}, the tasks of {spec.benchmark}, "
                         f"not {spec.first_tasks}")  # fmt: skip
    return all_to_device(in_scenario(tasks[: spec.first_tasks or None], spec.scenario), device)


def _find(tasks: Sequence[Task], wanted: str, benchmark: str) -> Task:
    """Return a task by its name, or by its number from 0, as the only task of a sequence."""
    found = [task for task in tasks if task.name == wanted] or [task for task in tasks if str(task.index) == wanted]
    if not found:
        raise ValueError(f"{benchmark} has no task {wanted!r}; {nearest(wanted, [task.name for task in tasks])}")
    return replace(found[0], index=0)


def build_trunk(spec: Run, tasks: Sequence[Task]) -> nn.Module:
    """Make the trunk of a run with its initial weights, or those of a file; without adapters."""
    with seeded(spec.seed, "weights"):
        trunk = NETWORKS.find(spec.network)(tasks[0].shape, **spec.network_options)
        initialise(trunk, spec.init)
    if spec.weights:
        load_weights(trunk, Path(spec.weights))
    return trunk


def build_method(spec: Run, tasks: Sequence[Task], trunk: nn.Module, device: torch.device | str) -> Method:
    """Make the method of a run on a trunk, which gets adapters and is frozen if the run says so."""
    if spec.adapters:
        trunk = lora(trunk, spec.adapters, spec.adapter_layers, seed=spec.seed)
    example = tasks[0].train.inputs(torch.arange(min(2, len(tasks[0].train)), device=device))
    net = Network(
        trunk.to(device),
        [task.classes for task in tasks],
        example,
        heads="class" if spec.scenario == "class" else spec.heads,
        init=spec.init,
        freeze=spec.freeze,
        seed=spec.seed,
    )
    if spec.trunk == "frozen" and not spec.adapters:
        net.frozen = freeze_all(trunk)
    return METHODS.find(spec.method)(net, **spec.method_options).to(device)


def described_trunk(spec: Run) -> dict[str, Any]:
    """Return how the trunk of a run is built, as the arguments `network` and `adapters` of `save`."""
    adapters = {"rank": spec.adapters, "layers": spec.adapter_layers} if spec.adapters else None
    return {"network": (spec.network, spec.network_options), "adapters": adapters}
