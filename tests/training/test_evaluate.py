"""Evaluation by hand: a method whose logits are written down."""

import math

import pytest
import torch
from torch import nn

from hatrack import Method, Network, Split, Task, evaluate
from hatrack.methods.evaluate import Evaluation, without_task_id
from hatrack.tasks.arrays import normalisation
from tests.helpers.toys import toy_tasks


class Known(Method):
    """The logits of task k are columns of the input: 0 and 1 for task 0, 2 to 4 for task 1."""

    def __init__(self, shared=False):
        super().__init__(
            Network(nn.Flatten(), [2, 3] if not shared else [3, 2], torch.zeros(2, 5), heads="shared" if shared else "multi")
        )

    def forward(self, x, task):
        return x[:, :2] if task == 0 else x[:, 2:]


def split(rows, labels, task):
    return Split(torch.tensor(rows), torch.tensor(labels), task, normalisation((5,), 0, 1), torch.arange(len(rows)))


X = [[3.0, 0.0, 1.0, 2.0, 0.0],  # task 0 says 0 with 3, task 1 says 1 with 2
     [0.0, 1.0, 0.0, 0.0, 5.0],  # task 0 says 1 with 1, task 1 says 2 with 5
     [0.0, 2.0, 0.0, 1.0, 0.0]]  # task 0 says 1 with 2, task 1 says 1 with 1  # fmt: skip


def test_loss_and_accuracy():
    score = evaluate(Known(), split(X, [0, 1, 0], 0))
    # -log softmax: log(1 + e^-3), log(1 + e^-1), log(1 + e^2); the first two are right
    assert score.loss == pytest.approx((math.log1p(math.exp(-3)) + math.log1p(math.exp(-1)) + math.log1p(math.exp(2))) / 3)
    assert score.accuracy == pytest.approx(2 / 3)


def test_more_examples_than_one_batch():
    many = split(X * 700, [0, 1, 0] * 700, 0)
    assert evaluate(Known(), many) == pytest.approx(evaluate(Known(), split(X, [0, 1, 0], 0)))


def test_without_a_task_id():
    # the winners are (task, class) (0, 0), (1, 2), (0, 1)
    assert without_task_id(Known(), split(X, [0, 1, 1], 0), [0, 1]) == pytest.approx(2 / 3)
    assert without_task_id(Known(), split(X, [1, 2, 1], 1), [0, 1]) == pytest.approx(1 / 3)
    assert without_task_id(Known(), split(X, [1, 2, 1], 1), [1]) == 1  # one task alone
    # with a shared head only the class counts
    assert without_task_id(Known(shared=True), split(X, [0, 2, 1], 1), [0, 1]) == 1


def test_evaluation_is_in_evaluation_mode_and_leaves_no_trace():
    task: Task = toy_tasks(1)[0]
    trunk = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.BatchNorm1d(16))
    method = Method(Network(trunk, [3], torch.zeros(2, 1, 4, 4))).train()
    before = trunk[2].running_mean.clone()
    assert evaluate(method, task.test) == evaluate(method, task.test)
    assert method.training
    assert trunk[1].training
    assert torch.equal(trunk[2].running_mean, before)


def test_evaluation_brings_the_data_to_the_device_of_the_method(monkeypatch):
    """There is no second device in this test, but one without values."""
    seen = []

    def noted(self):
        seen.append((self.split.x.device.type, self.split.transform.mean.device.type, self.total.device.type))

    monkeypatch.setattr(Evaluation, "__call__", noted)
    task = toy_tasks(1)[0]
    method = Method(Network(nn.Flatten(), [3], torch.zeros(2, 1, 4, 4)))
    evaluate(method, task.test)
    evaluate(method.to("meta"), task.test)
    assert seen == [("cpu",) * 3, ("meta",) * 3]


def test_a_whole_task_is_not_evaluated():
    task = toy_tasks(1)[0]
    with pytest.raises(ValueError, match=r"\.test, \.valid or \.train"):
        evaluate(Method(Network(nn.Flatten(), [3], torch.zeros(2, 1, 4, 4))), task)


def test_mixed_tasks_are_evaluated_by_their_own_heads():
    tasks = toy_tasks(2, classes=3)
    method = Method(Network(nn.Flatten(), [3, 3], torch.zeros(2, 1, 4, 4)))
    mixed = evaluate(method, Split.join([t.test for t in tasks]))
    each = [evaluate(method, t.test) for t in tasks]
    assert mixed.loss == pytest.approx(sum(s.loss for s in each) / 2, rel=1e-6)
    assert mixed.accuracy == pytest.approx(sum(s.accuracy for s in each) / 2)
