"""The demonstration: six small tasks on real images, learned one after the other by methods that forget and by HAT."""

from hatrack.experiments.spec import Run
from hatrack.regime import Regime

METHODS = ("sgd", "frozen", "hat", "joint", "random")
SEEDS = range(3)


def runs() -> list[Run]:
    """Two hidden layers of 300 units, ten epochs per task: short on purpose, about a minute on two cores."""
    return [
        Run(
            "digits-and-clothes",
            method,
            seed,
            regime=Regime(epochs=10),
            benchmark_options={"data": "sample"},
            network_options={"widths": (300, 300), "dropout": 0.0, "input_dropout": 0.0},
        )
        for method in METHODS
        for seed in SEEDS
    ]
