"""The option `validation` of HAT and PMASK: the validation loss has the price of capacity in it, as in the authors' code."""

import pytest
import torch

from hatrack import HAT, PMASK, Network, Regime, Trainer, evaluate
from hatrack.networks.mlp import mlp
from tests.helpers.toys import toy_tasks

C = 1.5


def learned(kind, validation, epochs=3, task=0, embedding="uniform"):
    """A method that has learned one task, or two, and the result of its last fit."""
    tasks = toy_tasks(2, shape=(1, 4, 4))
    torch.manual_seed(0)
    net = Network(mlp(tasks[0].shape, widths=(20, 20), dropout=0.0), tasks=tasks)
    method = kind(net, c=C, validation=validation, embedding=embedding)
    regime = Regime(epochs=epochs, batch=16, lr=0.05, restore=False, patience=2, factor=10.0, floor=1e-9)
    trainer = Trainer(regime, progress=False)
    for number in range(task + 1):
        method.learn(tasks[number], trainer)
    return method, tasks[task], trainer.fits[-1]


def price(method, task):
    """c times the share of what was free before the task that it opens, by hand."""
    own = method.final_gates(task)
    before = [method.final_gates(other) for other in range(task)]
    free = ~torch.stack([torch.zeros_like(own), *before]).any(0)
    return C * (own & free).sum().item() / free.sum().item()


@pytest.mark.parametrize("task", [0, 1])
@pytest.mark.parametrize("kind", [HAT, PMASK])
def test_the_validation_loss_has_the_price_in_it(kind, task):
    for validation, times in (("loss", 0), ("total", 1)):
        method, data, fit = learned(kind, validation, task=task, embedding="normal")
        expected = evaluate(method, data.valid).loss + times * price(method, task)
        assert price(method, task) > 0.01
        assert fit.epochs[-1].valid_loss == pytest.approx(expected, rel=1e-5)


def test_the_rate_stays_while_gates_close():
    """The validation loss of a small task stops falling long before all gates are closed that it does not need."""
    fits, sizes = {}, {}
    for validation in ("loss", "total"):
        method, _, fits[validation] = learned(HAT, validation, epochs=40)
        sizes[validation] = method.final_gates(0).float().mean().item()
    fast = {name: sum(epoch.lr == 0.05 for epoch in fit.epochs) for name, fit in fits.items()}
    assert fast["total"] > fast["loss"]
    assert sizes["total"] < sizes["loss"]


def test_the_bits_are_those_of_before_without_the_option():
    """What is trained is the same as long as neither the rate nor the best epoch is another one."""
    one, two = (learned(HAT, validation, epochs=2)[0].state_dict() for validation in ("loss", "total"))
    assert all(torch.equal(a, b) for a, b in zip(one.values(), two.values(), strict=True))
