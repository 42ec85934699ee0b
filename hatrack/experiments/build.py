"""The untrained method of a run."""

import torch

from hatrack.experiments.spec import Run
from hatrack.methods import METHODS
from hatrack.methods.method import Method
from hatrack.networks import NETWORKS
from hatrack.networks.initial_weights import initialise
from hatrack.networks.network import Network
from hatrack.seeds import seeded
from hatrack.tasks.task import Task


def build_method(spec: Run, tasks: list[Task], device: torch.device | str) -> Method:
    """Make the untrained method of a run for tasks that lie on the device."""
    with seeded(spec.seed, "weights"):
        trunk = NETWORKS[spec.network](tasks[0].shape, **spec.network_options)
        initialise(trunk, spec.init)
    example = tasks[0].train.inputs(torch.arange(min(2, len(tasks[0].train)), device=device))
    net = Network(
        trunk.to(device),
        [task.classes for task in tasks],
        example,
        heads=spec.heads,
        init=spec.init,
        freeze=spec.freeze,
        seed=spec.seed,
    )
    return METHODS.find(spec.method)(net, **spec.method_options).to(device)
