"""The demonstration: six small tasks on real images, learned one after the other by methods that forget and by HAT."""

from hatrack.experiments.spec import Run
from hatrack.networks import Init
from hatrack.regime import Regime

METHODS = ("sgd", "frozen", "hat", "joint", "random")
SEEDS = range(5)


def runs(init: Init = "default") -> list[Run]:
    """Return the runs: three hidden layers of 200 units, six epochs of SGD with momentum per task, a minute on two cores.

    In this regime plain SGD forgets clearly with PyTorch's and with Xavier's initial weights. Without momentum, in two
    layers of 300 units, it forgets clearly with PyTorch's only.

    Args:
        init: the initial weights; `hatrack demo` takes PyTorch's.
    """
    return [
        Run(
            "digits-and-clothes",
            method,
            seed,
            init=init,
            regime=Regime(epochs=6, optimizer="momentum"),
            benchmark_options={"data": "sample"},
            network_options={"widths": (200, 200, 200), "dropout": 0.0, "input_dropout": 0.0},
        )
        for method in METHODS
        for seed in SEEDS
    ]
