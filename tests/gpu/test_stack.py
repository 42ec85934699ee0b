"""Stacked runs on a GPU: the same to rounding as each alone, also the numbers of dropout, and nothing forgotten."""

import pytest
import torch

from hatrack import Regime, Trainer
from hatrack.engine.interleaving import run_interleaved
from tests.helpers.learning import make
from tests.helpers.pictures import convolutional, pictures
from tests.helpers.stacking import Learned, alone_and_stacked, assert_close
from tests.helpers.toys import toy_tasks

pytestmark = pytest.mark.gpu
REGIME = Regime(epochs=6, batch=16, lr=0.1)


def maker(name, engine):
    def build(seed):
        tasks = toy_tasks(2, seed=seed, train=100)
        return make(name, tasks, seed=seed), tasks, Trainer(REGIME, seed=seed, engine=engine)

    return build


@pytest.mark.parametrize("engine", ["eager", "recorded", "compiled"])
@pytest.mark.parametrize("name", ["sgd", "hat", "ewc", "packnet", "pmask", "si"])
def test_stacked_runs_learn_what_each_learns_alone(name, engine):
    """With dropout; recorded steps draw from generators of their own."""
    alone, stacked = alone_and_stacked(maker(name, engine), device="cuda")
    assert_close(alone, stacked, 2e-3)
    if name in ("hat", "packnet", "pmask"):
        assert not any(run.forgets() for run in stacked)


@pytest.mark.parametrize("engine", ["recorded", "compiled"])
def test_convolutions(engine):
    """Compiled alone, steps draw dropout with the channels last as well."""

    def build(seed):
        tasks = pictures(3)
        hard = Regime(epochs=6, batch=16, optimizer="adamw", lr=0.003, weight_decay=0.1, keep_state=True)
        return convolutional(tasks), tasks, Trainer(hard, seed=seed, engine=engine)

    stacked = run_interleaved([lambda s=s: Learned(build, s, "cuda") for s in range(3)], torch.device("cuda"), 3, stack=True)
    assert all("stacked" in e for run in stacked for e in run.engines)
    assert not any(run.forgets() for run in stacked)
    if engine == "compiled":
        alone = [Learned(build, seed, "cuda") for seed in range(3)]
        for one, two in zip(alone, stacked, strict=True):
            torch.testing.assert_close(torch.tensor(one.losses[:6]), torch.tensor(two.losses[:6]), rtol=5e-3, atol=5e-3)
