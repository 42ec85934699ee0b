"""Stable SGD: the published settings, each ingredient alone, and the changes that a fit is given."""

import math

import pytest
import torch
from torch import nn

from hatrack import METHODS, Network, Regime, Run, Trainer
from hatrack.__main__ import main
from hatrack.cli.values import convert
from hatrack.methods.stable_sgd import INGREDIENTS, StableSGD
from hatrack.networks.mlp import mlp
from hatrack.options import parameters
from hatrack.seeds import seeded
from tests.helpers.learning import learn
from tests.helpers.toys import toy_tasks


def make_net(tasks, **options) -> Network:
    with seeded(0, "weights"):
        trunk = mlp(tasks[0].shape, widths=(24, 24), **{"dropout": 0.5, "input_dropout": 0.0, **options})
    return Network(trunk, [t.classes for t in tasks], tasks[0].train.inputs(torch.arange(2)))


def make_stable(tasks=None, **options) -> StableSGD:
    return StableSGD(make_net(tasks or toy_tasks(1)), **options)


def shares(method: StableSGD) -> list[float]:
    return [m.p for m in method.net.trunk.modules() if isinstance(m, nn.Dropout)]


def test_the_regime_of_the_paper():
    """lr_k = max(0.1 * 0.8^k, 5e-5), written out for the first tasks."""
    method = make_stable()
    assert [method.regime(k)["lr"] for k in range(4)] == pytest.approx([0.1, 0.08, 0.064, 0.0512])
    assert {method.regime(k)["batch"] for k in range(20)} == {10}
    assert shares(method) == [0.25, 0.25]


def test_the_regime_of_the_authors_code():
    method = make_stable(decay_from="first", lr_decay=0.5, drop=0.5)
    assert [method.regime(k)["lr"] for k in range(3)] == pytest.approx([0.05, 0.025, 0.0125])
    assert method.regime(10)["lr"] == pytest.approx(5e-5), "0.1 / 2048 would be less"
    assert method.regime(9)["lr"] == pytest.approx(0.1 / 1024)
    assert shares(method) == [0.5, 0.5]


def test_the_plastic_regime():
    for stable in ((), ("none",)):
        method = make_stable(stable=stable)
        assert [method.regime(k) for k in (0, 7)] == [{"lr": 0.01, "batch": 64}] * 2
        assert shares(method) == [0.0, 0.0]


@pytest.mark.parametrize("ingredient", INGREDIENTS)
def test_each_ingredient_alone(ingredient):
    """One that is stable among plastic ones, and one that is plastic among stable ones."""
    on, off = make_stable(stable=(ingredient,)), make_stable(stable=tuple(i for i in INGREDIENTS if i != ingredient))

    def what_is_stable(method) -> set[str]:
        first, later = method.regime(0), method.regime(2)
        found = {"lr": first["lr"] > 0.05, "decay": later["lr"] < first["lr"], "batch": first["batch"] < 64}
        return {name for name, there in {**found, "dropout": shares(method) != [0, 0]}.items() if there}

    assert what_is_stable(on) == {ingredient}
    assert what_is_stable(off) == {*INGREDIENTS} - {ingredient}


def test_the_batch_may_shrink_from_task_to_task():
    method = make_stable(small_batch=40, batch_decay=0.5)
    assert [method.regime(k)["batch"] for k in (0, 1, 2, 3, 9)] == [40, 20, 10, 5, 1]


def test_a_first_rate_under_the_lowest_is_not_raised():
    assert make_stable(first_lr=1e-6).regime(5)["lr"] == 1e-6


def test_dropout_may_stay_as_the_network_has_it():
    assert shares(make_stable(drop=-1)) == [0.5, 0.5]


def test_every_kind_of_dropout_layer_is_set():
    trunk = nn.Sequential(nn.Dropout2d(0.1), nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Sequential(nn.AlphaDropout(0.1)))
    StableSGD(Network(trunk, [2], torch.zeros(2, 1, 4, 4)))
    assert (trunk[0].p, trunk[3][0].p) == (0.25, 0.25)


def test_the_trainer_gets_the_changes():
    """The learning rates and numbers of steps of real fits; all else is the regime's."""
    tasks = toy_tasks(3)  # 48 examples each
    method = make_stable(tasks, small_batch=9)
    steps = []
    method.constrain = lambda: steps.append(1)
    fit = learn(method, tasks, Trainer(Regime(epochs=2, lr=0.05, batch=64)))
    assert [f.epochs[0].lr for f in fit.fits] == pytest.approx([0.1, 0.08, 0.064])
    assert [len(f.epochs) for f in fit.fits] == [2, 2, 2]
    assert len(steps) == 3 * 2 * math.ceil(48 / 9)


def test_plastic_is_sgd_with_its_settings():
    tasks = toy_tasks(2)
    plastic = make_stable(tasks, stable=("batch",))
    naive = METHODS["sgd"](make_net(tasks, dropout=0.0))
    learn(plastic, tasks, Trainer(Regime(epochs=2, optimizer="momentum", momentum=0.8)))
    learn(naive, tasks, Trainer(Regime(epochs=2, optimizer="momentum", momentum=0.8, lr=0.01, batch=10)))
    pairs = zip(plastic.parameters(), naive.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)


def test_the_command_line(capsys):
    stable = parameters(StableSGD)["stable"]
    assert convert(stable, "lr,decay") == ("lr", "decay")
    assert Run("rmnist", "stable-sgd", method_options={"stable": ("none",)}).spec["method_options"]["stable"] == ["none"]
    assert main(["run", "rmnist", "stable-sgd", "--help"]) == 0
    assert "--stable" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"stable": ("drop",)}, "did you mean 'dropout'"),
        ({"stable": ("lr", "none")}, "no ingredient 'none'"),
        ({"stable": "lr"}, "stable must be"),
        ({"first_lr": 0.0}, "first_lr"),
        ({"lr_decay": 1.5}, "lr_decay"),
        ({"drop": 1.0}, "drop"),
    ],
)
def test_wrong_options(wrong, said):
    with pytest.raises(ValueError, match=said):
        make_stable(**wrong)
