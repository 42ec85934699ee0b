"""Evaluation by hand: a method whose logits are written down."""

import math

import pytest
import torch
from torch import nn

from hatrack import METHODS, Method, Network, Regime, Split, Task, Trainer, evaluate
from hatrack.methods.evaluate import Evaluation, Evaluations, images_per_batch, without_task_id, without_task_ids
from hatrack.tasks.arrays import normalisation
from hatrack.tasks.device import all_to_device
from tests.helpers.learning import MULTI_ONLY, learn, make
from tests.helpers.tiers import quick_and_slow
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


# Several data sets at once


class ReadBackError(Exception):
    """The results were about to be read from the device."""


def stop_here():
    raise ReadBackError


@pytest.mark.parametrize("name", quick_and_slow(METHODS))
def test_several_data_sets_are_evaluated_as_one_by_one(name):
    tasks = toy_tasks(3, test=1500)  # more than one batch
    method = make(name, tasks)
    learn(method, tasks[:2], Trainer(Regime(epochs=1, batch=16)))
    splits = [split for task in tasks for split in (task.test, task.train)]
    evaluations = Evaluations(method.train(), splits)
    for _ in range(2):
        assert evaluations() == [evaluate(method, split) for split in splits], "in every bit"
    assert method.training


def meta(tasks):
    """Tasks on the meta device, where tensors have no values: to read one is an error."""
    return [task.test for task in all_to_device(tasks, "meta")]


def test_nothing_is_read_before_all_data_sets_are_done():
    splits = meta(toy_tasks(3, test=2500))
    method = Method(Network(nn.Sequential(nn.Flatten(), nn.Linear(16, 8)), [3] * 3, torch.zeros(2, 1, 4, 4))).to("meta")
    batches = []
    method.net.trunk.register_forward_hook(lambda *call: batches.append(len(call[2])))
    with pytest.raises(ReadBackError):
        Evaluations(method, splits, wait=stop_here)()
    assert batches == [1000, 1000, 500] * 3
    with pytest.raises(ReadBackError):
        without_task_ids(method, splits, range(3), wait=stop_here)
    assert batches == [1000, 1000, 500] * 6


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("frozen", "lora", "random", "pathnet", "pnn")])
def test_methods_whose_evaluation_reads_nothing(name):
    """The others read the path, the column or the guess of a task, `frozen` and `lora` whether a task was learned."""
    tasks = toy_tasks(2)
    method = make(name, tasks).to("meta").eval()
    with pytest.raises(ReadBackError):
        Evaluations(method, meta(tasks), wait=stop_here)()


def test_what_is_recorded_per_data_set():
    tasks = toy_tasks(2)
    method, wrapped = make("sgd", tasks), []

    def wrap(function):
        wrapped.append(0)
        number = len(wrapped) - 1

        def counted(index):
            wrapped[number] += 1
            return function(index)

        return counted

    on_host = all_to_device(tasks, "cpu", room=0)[1].test
    assert on_host.on_host
    evaluations = Evaluations(method, [tasks[0].test, on_host], wrap=wrap)
    assert evaluations() == evaluations() == [evaluate(method, task.test) for task in tasks]
    assert wrapped == [2], "not the one whose images are gathered on the host"


@pytest.mark.parametrize(("count", "shape", "most"), [(10_000, (1, 28, 28), 10_000), (10_000, (3, 32, 32), 2500),
                                                      (2731, (3, 32, 32), 1366), (3000, (3, 224, 224), 1000)])  # fmt: skip
def test_batches_on_a_gpu_are_large_and_even(count, shape, most, monkeypatch):
    y = torch.zeros(count, dtype=torch.int64)
    data = Split(torch.empty(0), y, 0, normalisation(shape, 0, 1), y)
    assert images_per_batch(data) == 1000
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda"))
    assert images_per_batch(data) == most


# Without a task id


def plain_loop(method, data, tasks):
    """A forward pass per task and image by image: how many have the largest logit of all at their task and class."""
    right = 0
    for number in range(len(data)):
        x = data.inputs(torch.tensor([number]))
        best = [max((value, -label) for label, value in enumerate(method(x, task)[0].tolist())) for task in tasks]
        winner = max(range(len(tasks)), key=lambda k: (best[k][0], -k))
        right += -best[winner][1] == data.y[number] and (method.net.shared or tasks[winner] == data.task)
    return right / len(data)


@pytest.mark.parametrize("heads", ["multi", "shared"])
@pytest.mark.parametrize("name", quick_and_slow([name for name in METHODS if name != "random"]))
def test_without_a_task_id_every_method_is_as_a_plain_loop(name, heads):
    if name in MULTI_ONLY and heads == "shared":
        pytest.skip("it needs a head per task")
    tasks = toy_tasks(3)
    method = make(name, tasks, heads=heads)
    learn(method, tasks[:2], Trainer(Regime(epochs=2, batch=16)))
    found = without_task_ids(method.train(), [task.test for task in tasks], [0, 1, 2])
    assert method.training
    method.eval()
    assert found == [plain_loop(method, task.test, [0, 1, 2]) for task in tasks]
    assert found == [without_task_id(method, task.test, [0, 1, 2]) for task in tasks]
    assert 0 < sum(found) < 3


def passes_of_the_trunk(method, task, tasks):
    passes = []
    handle = method.net.trunk.register_forward_hook(lambda *_: passes.append(1))
    without_task_id(method, task.test, tasks)
    handle.remove()
    return len(passes)


def test_the_trunk_runs_once_for_all_heads_unless_features_depend_on_the_task():
    tasks = toy_tasks(3)
    for name in ("sgd", "ewc", "si", "mas", "lwf", "lfl", "agem", "er", "derpp", "joint", "imm-mean", "stable-sgd"):
        assert passes_of_the_trunk(make(name, tasks), tasks[0], [0, 1, 2]) == 1, name
    assert passes_of_the_trunk(make("hat", tasks), tasks[0], [0, 1, 2]) == 3


def test_a_forward_that_somebody_changed_is_called():
    tasks = toy_tasks(2)

    class Turned(Method):
        def forward(self, x, task):
            return -super().forward(x, task)

    class OtherNetwork(Network):
        def forward(self, x, task):
            return -super().forward(x, task)

    def net(kind=Network):
        return kind(nn.Sequential(nn.Flatten(), nn.Linear(16, 8)), [3, 3], torch.zeros(2, 1, 4, 4))

    patched, hooked = Method(net()), Method(net())
    hooked.load_state_dict(patched.state_dict())
    forward = patched.forward
    patched.forward = lambda x, task: -forward(x, task)
    hooked.net.register_forward_hook(lambda *call: -call[2])
    for method in (Turned(net()), Method(net(OtherNetwork)), patched, hooked):
        method.eval()
        assert without_task_id(method, tasks[0].test, [0, 1]) == plain_loop(method, tasks[0].test, [0, 1])
        assert passes_of_the_trunk(method, tasks[0], [0, 1]) == 2
