"""Learning under autocast, and in bfloat16 by the Trainer's own option."""

import pytest
import torch

from hatrack import Regime, Trainer, evaluate
from hatrack.engine import precision
from tests.helpers.learning import logits, make
from tests.helpers.tiers import quick_and_slow
from tests.helpers.toys import toy_tasks

FIT = Regime(epochs=8, batch=8, optimizer="adamw", lr=0.01)


@pytest.fixture
def able():
    if not precision.cpu_computes_bfloat16():
        pytest.skip("this processor can't compute in bfloat16")


@pytest.mark.parametrize("name", quick_and_slow(["hat", "pmask", "packnet", "ewc", "independent"], ["hat", "ewc"]))
@pytest.mark.usefixtures("able")
def test_autocast_around_learn_learns(name):
    tasks = toy_tasks(2)
    method, plain = make(name, tasks), make(name, tasks)
    fits = [Trainer(FIT), Trainer(FIT)]
    with torch.autocast("cpu", torch.bfloat16):
        method.learn(tasks[0], fits[0])
        assert torch.is_autocast_cache_enabled()
    plain.learn(tasks[0], fits[1])
    losses, others = ([epoch.loss for epoch in fit.fits[0].epochs] for fit in fits)
    assert losses != others, "it computed in bfloat16"
    assert losses == pytest.approx(others, rel=0.1)
    before = logits(method, tasks[0])
    with torch.autocast("cpu", torch.bfloat16):
        method.learn(tasks[1], fits[0])
    assert name == "ewc" or torch.equal(logits(method, tasks[0]), before)


@pytest.mark.usefixtures("able")
def test_a_fit_by_itself_learns_under_autocast():
    tasks = toy_tasks(1)
    method = make("sgd", tasks)
    with torch.autocast("cpu", torch.bfloat16):
        Trainer(FIT)(method, tasks[0])
    assert evaluate(method, tasks[0].test).accuracy > 0.9


@pytest.mark.usefixtures("able")
def test_a_trainer_computes_in_bfloat16_on_a_cpu_that_can():
    tasks = toy_tasks(1)
    methods = [make("hat", tasks), make("hat", tasks)]
    fits = [Trainer(FIT, precision="bfloat16"), Trainer(FIT)]
    for method, fit in zip(methods, fits, strict=True):
        method.learn(tasks[0], fit)
    losses, others = ([epoch.loss for epoch in fit.fits[0].epochs] for fit in fits)
    assert losses != others
    assert losses == pytest.approx(others, rel=0.1)
    assert {value.dtype for value in methods[0].net.state_dict().values() if value.is_floating_point()} == {torch.float32}
    assert "precision='bfloat16'" in repr(fits[0])


def test_a_cpu_that_cannot_is_refused(monkeypatch):
    monkeypatch.setattr(precision, "cpu_computes_bfloat16", lambda: False)
    tasks = toy_tasks(1)
    with pytest.raises(ValueError, match=r"bfloat16.* needs a GPU"):
        make("hat", tasks).learn(tasks[0], Trainer(FIT, precision="bfloat16"))
    with pytest.raises(ValueError, match="did you mean 'bfloat16'"):
        Trainer(FIT, precision="bf16")
