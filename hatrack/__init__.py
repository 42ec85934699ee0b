"""hatrack: train one network on task after task without losing the earlier ones."""

from hatrack._version import __version__
from hatrack.experiments.record import Record
from hatrack.experiments.run import Run, run
from hatrack.methods import METHODS
from hatrack.methods.divergence import Diverged
from hatrack.methods.evaluate import evaluate
from hatrack.methods.hat import HAT
from hatrack.methods.method import Method
from hatrack.networks import NETWORKS
from hatrack.networks.network import Network
from hatrack.regime import Regime
from hatrack.tasks.split import Batch, Split
from hatrack.tasks.task import Task
from hatrack.training.saving import load, save
from hatrack.training.trainer import Trainer

__all__ = [
    "HAT",
    "METHODS",
    "NETWORKS",
    "Batch",
    "Diverged",
    "Method",
    "Network",
    "Record",
    "Regime",
    "Run",
    "Split",
    "Task",
    "Trainer",
    "__version__",
    "evaluate",
    "load",
    "run",
    "save",
]
