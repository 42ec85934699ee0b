"""hatrack: train one network on task after task without losing the earlier ones."""

from hatrack._version import __version__
from hatrack.evaluate import evaluate
from hatrack.keep import load
from hatrack.method import Method
from hatrack.methods import METHODS
from hatrack.methods.hat import HAT
from hatrack.networks import NETWORKS
from hatrack.networks.network import Network
from hatrack.record import Record
from hatrack.regime import Regime
from hatrack.run import Run, run
from hatrack.task import Batch, Split, Task
from hatrack.trainer import Diverged, Trainer

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
]
