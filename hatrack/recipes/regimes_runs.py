"""The runs of the training-regimes paper (004) on MNIST: plain SGD, stable SGD, and the baselines as in their own code."""

from dataclasses import replace
from typing import Any

from hatrack.experiments.spec import Run
from hatrack.recipes.quantities import Quantity, summary
from hatrack.regime import Regime

ACCURACY, LEARNING, FORGETTING = summary("accuracy"), summary("learning"), summary("forgetting_mirzadeh")
COLUMNS: tuple[Quantity, ...] = (ACCURACY, FORGETTING, LEARNING)
MOMENTUM = Regime(epochs=1, batch=10, lr=0.01, optimizer="momentum", momentum=0.8)
STABLE: dict[str, Any] = {"decay_from": "first"}  # the authors' code decays the rate before the first task already


def mnist(benchmark: str, method: str, regime: Regime, *, width: int = 256, dropout: float = 0.0, **options: Any) -> Run:
    """Return the run of a method on permuted or rotated MNIST with one head."""
    plain: dict[str, Any] = {"first": "plain", "normalise": False, "valid": 0.0} if benchmark == "pmnist" else {}
    own = [name for name in options if name in ("tasks", "step", "valid", "first")]
    chosen = {name: options.pop(name) for name in own}
    tasks: dict[str, Any] = {"tasks": 20, **plain, **chosen}
    return Run(
        benchmark,
        method,
        heads="shared",
        regime=regime,
        benchmark_options=tasks,
        network_options={"widths": (width, width), "dropout": dropout, "input_dropout": 0.0},
        method_options=options,
    )


def stable(benchmark: str, **options: Any) -> Run:
    """Return stable SGD on MNIST; its learning rate, batch and dropout are options of the method."""
    own = {name: options.pop(name) for name in ("width", "tasks", "step", "regime") if name in options}
    regime = replace(own.pop("regime", MOMENTUM), batch=64, lr=0.05)  # not in use: those of the method are
    return mnist(benchmark, "stable-sgd", regime, dropout=0.25, **own, **STABLE, **options)


def baseline(benchmark: str, method: str, **options: Any) -> Run:
    """Return a baseline of Table 2 as in the code of A-GEM, which 004 uses: batch 32, plain SGD at 0.1, dropout."""
    return mnist(benchmark, method, Regime(epochs=1, batch=32, lr=0.1), dropout=0.25, **options)


EWC: dict[str, Any] = {"strength": 20.0, "limit": 0.0, "anchors": "last", "rescale": True}
ER: dict[str, Any] = {"memory": 230, "replay": 64}
AGEM: dict[str, Any] = {"per_class": 1, "reference": 64}
