"""The approaches of HAT's Table 1 (001) with the settings of the authors' code: its hyper-parameters after their search, its
clipping, and for PNN and PathNet its budget of parameters."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hatrack.experiments.spec import Run
from hatrack.recipes.recipe import Published
from hatrack.regime import Regime


@dataclass(frozen=True)
class Approach:
    """An approach of Table 1: the method, its options and its clipping in the authors' code, and its forgetting ratios."""

    label: str
    method: str
    after_2: Published | None = None
    after_8: Published | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    clip: float = 1e4
    epochs: int = 200
    seeds: tuple[int, ...] = (0, 1, 2)
    note: str = ""

    def run(self, benchmark: str, **options: Any) -> Run:
        """Return the run of this approach on a benchmark."""
        regime = Regime(clip=self.clip, epochs=self.epochs)
        return Run(benchmark, self.method, regime=regime, method_options=self.options, benchmark_options=options)


def P(mean: float, std: float | None = None) -> Published:  # noqa: N802
    """Return a number of 001's Table 1, which are means over ten seeds."""
    return Published(mean, std, 10)


HAT_NOTE = (
    "Gates are binary when a task is finished, where the authors' code leaves them soft, and the validation loss does not "
    "have the price of capacity in it, as it has there."
)
EWC_NOTE = (
    "The outcome of the authors' search on the mixture, as their code has it. So strong a penalty makes many springs "
    "stiffer than plain SGD can follow at its first learning rate: the training loss of later tasks stays in the tens or "
    "hundreds until the rate falls, and only clipping bounds it (see the page of ewc). Their code adds the penalty to the "
    "validation loss, by which the rate falls and the best epoch is chosen; ours does not, and we believe this to be the "
    "reason of a difference."
)
IMM_MEAN_NOTE = (
    "Heads of single tasks are not averaged; the authors' code averages them with their initial values. It also adds the "
    "pull to the validation loss that chooses the best epoch; here it is the plain loss."
)
PATHNET_NOTE = "At most 60 epochs for each of two paths, so 120 per task; the paper's code has 200, so 400."
LFL_NOTE = "The authors' code adds the pull to the validation loss that chooses the best epoch; here it is the plain loss."
PNN_NOTE = (
    "Columns as wide as in the authors' code. Its budget of 7.1 million parameters counts connections from earlier columns "
    "to the outputs, about a third, that are never used; without these 4.5 million are left on ten tasks."
)
APPROACHES = (
    Approach("HAT", "hat", P(-0.02, 0.03), P(-0.06, 0.01), note=HAT_NOTE),
    Approach("PNN", "pnn", P(-0.11, 0.10), P(-0.11, 0.01), {"columns": "budget"}, seeds=(0,), note=PNN_NOTE),
    Approach("PathNet", "pathnet", P(-0.09, 0.16), P(-0.17, 0.23), clip=1e3, epochs=60, seeds=(0,), note=PATHNET_NOTE),
    Approach(
        "EWC",
        "ewc",
        P(-0.08, 0.06),
        P(-0.25, 0.03),
        {"strength": 5000.0, "limit": 0.0, "anchors": "mean", "estimator": "batches"},
        clip=100,
        note=EWC_NOTE,
    ),
    Approach("IMM-mean", "imm-mean", P(-0.12, 0.10), P(-0.42, 0.04), note=IMM_MEAN_NOTE),
    Approach("SGD-F", "frozen", P(-0.20, 0.15), P(-0.44, 0.06)),
    Approach(
        "IMM-mode",
        "imm-mode",
        P(-0.11, 0.08),
        P(-0.49, 0.05),
        {"merge": "none", "estimator": "batches"},
        clip=1e3,
        note="As in the authors' code, whose merge by the mode is computed and never written into the network.",
    ),
    Approach("SGD", "sgd", P(-0.20, 0.08), P(-0.66, 0.03)),
    Approach("LwF", "lwf", P(-0.14, 0.13), P(-0.80, 0.06), clip=100),
    Approach("LFL", "lfl", P(-0.73, 0.29), P(-0.92, 0.08), {"strength": 0.05}, clip=200, note=LFL_NOTE),
)
MERGED = Approach(
    "IMM-mode, merged",
    "imm-mode",
    clip=1e3,
    note="With the merge that IMM's own paper describes, by the Fisher information of single images in place of batches.",
)
RANDOM = Approach("random", "random")
WHOLE = ("IMM-mean", "IMM-mode", "SGD-F", "SGD", "LwF", "LFL")  # besides EWC: no task has parts of the network of its own


def joint(*at: int) -> Approach:
    """Return joint training, fitted after these numbers of tasks only; after every number if there are none."""
    return Approach("joint", "joint", options={"at": at} if at else {})
