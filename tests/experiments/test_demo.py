"""The demonstration: plain SGD forgets and HAT does not, whatever the initial weights are."""

import pytest

from hatrack.experiments.demo import METHODS, SEEDS, runs
from hatrack.experiments.run import run


def test_every_method_has_every_seed():
    made = runs()
    assert {(spec.method, spec.seed) for spec in made} == {(method, seed) for method in METHODS for seed in SEEDS}
    assert len({spec.name for spec in made}) == len(made) == len(METHODS) * len(SEEDS)
    assert all(spec.benchmark_options["data"] == "sample" for spec in made), "nothing is downloaded"


@pytest.mark.slow
@pytest.mark.parametrize("init", ["default", "xavier"])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_message_does_not_depend_on_the_initial_weights(seed, init):
    chosen = [spec for spec in runs(init) if spec.seed == seed and spec.method in ("sgd", "hat", "joint")]
    assert {spec.init for spec in chosen} == {init}
    sgd, hat, joint = (
        next(run(spec, engine="eager").summary for spec in chosen if spec.method == name) for name in ("sgd", "hat", "joint")
    )
    assert hat["accuracy"] - sgd["accuracy"] > 0.08
    assert sgd["forgetting"] > 0.1
    assert hat["forgetting"] == 0
    assert hat["accuracy"] > joint["accuracy"] - 0.02
