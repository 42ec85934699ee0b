"""A small run on the sample data."""

from hatrack import Regime, Run

SMALL = {
    "benchmark_options": {"data": "sample"},
    "network_options": {
        "widths": (20,),
        "dropout": 0.2,
        "input_dropout": 0.0,
    },  # that of 784 pixels would take half of the time
    "regime": Regime(epochs=1, batch=100),
    "train_examples": 200,
}


def small(method: str = "sgd", seed: int = 0, **changes) -> Run:
    return Run("smnist", method, seed, **{**SMALL, **changes})
