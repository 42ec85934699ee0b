"""`python -m speed.promise`: everything is measured, and a wrong answer is counted."""

import pytest
import torch

from speed.promise import ASKED, ask, costs, serve

pytestmark = pytest.mark.slow  # the speed harness


def test_costs_are_measured_against_plain_sgd():
    plain, hat, pmask = costs("mlp", ["hat", "pmask"], rounds=2)
    assert (plain.method, plain.ratio, hat.method, pmask.method) == ("sgd", 1.0, "hat", "pmask")
    assert all(cost.step > 0 and cost.ratio > 0 and cost.asked is None for cost in (plain, hat, pmask))
    assert hat.construction > plain.construction
    assert ASKED == {("resnet18", "hat"): 1.3, ("alexnet", "pmask"): 1.6}


@pytest.mark.parametrize("name", ["hat", "pnn"])
def test_predictions_are_counted(name):
    found = serve(name, calls=40, threads=4)
    assert (found.wrong, found.changed) == (0, 0)
    assert min(found.one, found.many, found.modules) > 0


def test_a_wrong_answer_is_counted():
    right = [torch.zeros(3), torch.ones(3)]
    assert ask(lambda k: right[k], right, 10, 2)[1] == 0
    assert ask(lambda k: right[0], right, 10, 2)[1] == 5
