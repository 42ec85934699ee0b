"""Make the tasks, the trunk and the untrained method of a run."""

from collections.abc import Sequence

import torch
from torch import nn

from hatrack.benchmarks import BENCHMARKS
from hatrack.experiments.spec import Run
from hatrack.methods import METHODS
from hatrack.methods.method import Method
from hatrack.networks import NETWORKS
from hatrack.networks.initial_weights import initialise
from hatrack.networks.network import Network
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
    tasks = BENCHMARKS[spec.benchmark](spec.seed, **spec.benchmark_options)
    if spec.first_tasks > len(tasks):
        raise ValueError(f"first_tasks (--first-tasks) must be at most {len(tasks)}, the tasks of {spec.benchmark}, "
                         f"not {spec.first_tasks}")  # fmt: skip
    return all_to_device(in_scenario(tasks[: spec.first_tasks or None], spec.scenario), device)


def build_trunk(spec: Run, tasks: Sequence[Task]) -> nn.Module:
    """Make the trunk of a run with its initial weights."""
    with seeded(spec.seed, "weights"):
        trunk = NETWORKS[spec.network](tasks[0].shape, **spec.network_options)
        initialise(trunk, spec.init)
    return trunk


def build_method(spec: Run, tasks: Sequence[Task], trunk: nn.Module, device: torch.device | str) -> Method:
    """Make the method of a run on a trunk."""
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
    return METHODS.find(spec.method)(net, **spec.method_options).to(device)
