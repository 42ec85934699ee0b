"""Steps on a transformer and on a recurrent network are the same steps when they are captured for the compiler."""

import copy

import pytest
import torch
from torch import nn

from hatrack import METHODS, NETWORKS, Network, Regime, Trainer
from hatrack.engine import compiled
from hatrack.seeds import seeded
from tests.helpers.learning import learn
from tests.helpers.toys import toy_tasks

SMALL = {"vit": {"width": 16, "depth": 1, "attention_heads": 2, "mlp_ratio": 2}, "gru": {"width": 12}}


@pytest.fixture
def captured_only(monkeypatch):
    """Run the captured operations without compiling them, which takes seconds each time."""
    monkeypatch.setattr(compiled, "compile_graph", lambda graph, *_: copy.deepcopy(graph))
    monkeypatch.setattr(compiled, "_code_cache", {})


def largest_difference(name, trunk, tasks, **options):
    """The largest difference between the weights after eager and after captured steps, with dropout."""
    states = []
    for engine in ("eager", "compiled"):
        with seeded(0, "weights"):
            method = METHODS[name](Network(trunk(), tasks=tasks), **options)
        fit = learn(method, tasks, Trainer(Regime(epochs=2, batch=16, lr=0.1), engine=engine))
        assert {result.engine for result in fit.fits} == {engine}
        states.append(method.state_dict())
    return max((now.double() - states[1][key].double()).abs().max().item() for key, now in states[0].items())


@pytest.mark.parametrize(
    ("name", "network"),
    [
        pytest.param("sgd", "vit", marks=pytest.mark.slow),
        ("hat", "vit"),
        pytest.param("sgd", "gru", marks=pytest.mark.slow),
        ("pmask", "gru"),
    ],
)
@pytest.mark.filterwarnings("ignore:task .* finds under:UserWarning")
def test_captured_steps_are_the_eager_ones(name, network, captured_only):
    tasks = toy_tasks(1, shape=(1, 8, 8))
    trunk = NETWORKS[network]
    assert largest_difference(name, lambda: trunk((1, 8, 8), **SMALL[network]), tasks) < 1e-5


def test_captured_steps_with_soft_masks(captured_only):
    """The second task finds a share of every weight taken."""
    tasks = toy_tasks(2)

    def trunk():
        return NETWORKS["mlp"](tasks[0].shape, widths=(12, 12))

    assert largest_difference("pmask", trunk, tasks, masks="soft", smax=25.0) < 1e-5


class Shifted(nn.Module):
    """A layer behind a parameter that can't be followed."""

    def __init__(self):
        super().__init__()
        self.shift, self.layer = nn.Parameter(torch.zeros(16)), nn.Linear(16, 12)

    def forward(self, x):
        return self.layer((x.flatten(1) + self.shift).cumprod(1)).relu()


@pytest.mark.parametrize("masks", ["binary", "soft"])
def test_the_first_task_trains_what_is_held_whole(masks, captured_only):
    tasks = toy_tasks(1)
    for engine in ("eager", "compiled"):
        with seeded(0, "weights"):
            method = METHODS["hat"](Network(Shifted(), tasks=tasks), masks=masks, leave="shift")
        assert "shift" in method.held
        learn(method, tasks, Trainer(Regime(epochs=1, batch=16, lr=0.1), engine=engine))
        assert method.net.trunk.shift.abs().max() > 1e-6, engine
