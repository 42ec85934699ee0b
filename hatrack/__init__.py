"""hatrack: train one network on task after task without losing the earlier ones.

The public names. Each is imported from its module when it is first used, so that `import hatrack` takes no time.
"""

import importlib
from typing import TYPE_CHECKING, Any

from hatrack._version import __version__

if TYPE_CHECKING:
    from hatrack.benchmarks import BENCHMARKS as BENCHMARKS
    from hatrack.experiments.record import Record as Record
    from hatrack.experiments.records import records as records
    from hatrack.experiments.run import run as run
    from hatrack.experiments.spec import Run as Run
    from hatrack.guard.guard import Guard as Guard
    from hatrack.guard.protect import load_guard as load_guard
    from hatrack.guard.protect import protect as protect
    from hatrack.inspection.capacity import Capacity as Capacity
    from hatrack.inspection.flatness import Flatness as Flatness
    from hatrack.inspection.flatness_measuring import flatness as flatness
    from hatrack.inspection.measuring import capacity as capacity
    from hatrack.methods import METHODS as METHODS
    from hatrack.methods.agem import AGEM as AGEM
    from hatrack.methods.certificate import compare_certificates as compare_certificates
    from hatrack.methods.den import DEN as DEN
    from hatrack.methods.derpp import DERpp as DERpp
    from hatrack.methods.divergence import Diverged as Diverged
    from hatrack.methods.er import ER as ER
    from hatrack.methods.evaluate import evaluate as evaluate
    from hatrack.methods.ewc import EWC as EWC
    from hatrack.methods.fit import Fit as Fit
    from hatrack.methods.fit import FitResult as FitResult
    from hatrack.methods.fit import LearnResult as LearnResult
    from hatrack.methods.frozen import Frozen as Frozen
    from hatrack.methods.hat import HAT as HAT
    from hatrack.methods.imm_mean import IMMMean as IMMMean
    from hatrack.methods.imm_mode import IMMMode as IMMMode
    from hatrack.methods.independent import Independent as Independent
    from hatrack.methods.joint import Joint as Joint
    from hatrack.methods.lfl import LFL as LFL
    from hatrack.methods.lora import LoRA as LoRA
    from hatrack.methods.lwf import LwF as LwF
    from hatrack.methods.mas import MAS as MAS
    from hatrack.methods.method import Method as Method
    from hatrack.methods.packnet import PackNet as PackNet
    from hatrack.methods.pathnet import PathNet as PathNet
    from hatrack.methods.pmask import PMASK as PMASK
    from hatrack.methods.pnn import PNN as PNN
    from hatrack.methods.random import Random as Random
    from hatrack.methods.si import SI as SI
    from hatrack.methods.stable_sgd import StableSGD as StableSGD
    from hatrack.networks import NETWORKS as NETWORKS
    from hatrack.networks.adapters import lora as lora
    from hatrack.networks.network import Network as Network
    from hatrack.options import Option as Option
    from hatrack.options import check as check
    from hatrack.regime import Regime as Regime
    from hatrack.reporting.report import report as report
    from hatrack.tasks.scenario import in_scenario as in_scenario
    from hatrack.tasks.split import Batch as Batch
    from hatrack.tasks.split import Split as Split
    from hatrack.tasks.task import Task as Task
    from hatrack.tracking.tensorboard import TensorBoard as TensorBoard
    from hatrack.tracking.weights_and_biases import WandB as WandB
    from hatrack.training.saving import load as load
    from hatrack.training.saving import save as save
    from hatrack.training.trainer import Trainer as Trainer

PLACES = {
    "AGEM": "hatrack.methods.agem",
    "BENCHMARKS": "hatrack.benchmarks",
    "Batch": "hatrack.tasks.split",
    "Capacity": "hatrack.inspection.capacity",
    "DEN": "hatrack.methods.den",
    "DERpp": "hatrack.methods.derpp",
    "Diverged": "hatrack.methods.divergence",
    "ER": "hatrack.methods.er",
    "EWC": "hatrack.methods.ewc",
    "Fit": "hatrack.methods.fit",
    "FitResult": "hatrack.methods.fit",
    "Flatness": "hatrack.inspection.flatness",
    "Frozen": "hatrack.methods.frozen",
    "Guard": "hatrack.guard.guard",
    "HAT": "hatrack.methods.hat",
    "IMMMean": "hatrack.methods.imm_mean",
    "IMMMode": "hatrack.methods.imm_mode",
    "Independent": "hatrack.methods.independent",
    "Joint": "hatrack.methods.joint",
    "LFL": "hatrack.methods.lfl",
    "LearnResult": "hatrack.methods.fit",
    "LoRA": "hatrack.methods.lora",
    "LwF": "hatrack.methods.lwf",
    "MAS": "hatrack.methods.mas",
    "METHODS": "hatrack.methods",
    "Method": "hatrack.methods.method",
    "NETWORKS": "hatrack.networks",
    "Network": "hatrack.networks.network",
    "Option": "hatrack.options",
    "PMASK": "hatrack.methods.pmask",
    "PNN": "hatrack.methods.pnn",
    "PackNet": "hatrack.methods.packnet",
    "PathNet": "hatrack.methods.pathnet",
    "Random": "hatrack.methods.random",
    "Record": "hatrack.experiments.record",
    "Regime": "hatrack.regime",
    "Run": "hatrack.experiments.spec",
    "SI": "hatrack.methods.si",
    "Split": "hatrack.tasks.split",
    "StableSGD": "hatrack.methods.stable_sgd",
    "Task": "hatrack.tasks.task",
    "TensorBoard": "hatrack.tracking.tensorboard",
    "Trainer": "hatrack.training.trainer",
    "WandB": "hatrack.tracking.weights_and_biases",
    "capacity": "hatrack.inspection.measuring",
    "check": "hatrack.options",
    "compare_certificates": "hatrack.methods.certificate",
    "evaluate": "hatrack.methods.evaluate",
    "flatness": "hatrack.inspection.flatness_measuring",
    "in_scenario": "hatrack.tasks.scenario",
    "load": "hatrack.training.saving",
    "load_guard": "hatrack.guard.protect",
    "lora": "hatrack.networks.adapters",
    "protect": "hatrack.guard.protect",
    "records": "hatrack.experiments.records",
    "report": "hatrack.reporting.report",
    "run": "hatrack.experiments.run",
    "save": "hatrack.training.saving",
}
__all__ = [*PLACES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module 'hatrack' has no attribute {name!r}")
    globals()[name] = found = getattr(importlib.import_module(PLACES[name]), name)
    return found


def __dir__() -> list[str]:
    return __all__
