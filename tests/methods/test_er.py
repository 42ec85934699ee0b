"""Experience replay against plain formulas."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hatrack import METHODS, Network, Regime, Trainer, evaluate
from hatrack.methods.er import ER
from hatrack.methods.parts.memory import Reservoir, Ring
from hatrack.seeds import seeded
from hatrack.tasks.split import Batch
from hatrack.tasks.task import Task
from tests.helpers.learning import learn, logits
from tests.helpers.toys import toy_tasks


def make_er(tasks: list[Task], *, norm: bool = False, heads: str = "multi", **options) -> ER:
    with seeded(0, "weights"):
        layers = [nn.Flatten(), nn.Linear(16, 12), *([nn.BatchNorm1d(12)] if norm else []), nn.ReLU()]
    example = tasks[0].train.inputs(torch.arange(2))
    return ER(Network(nn.Sequential(*layers), [t.classes for t in tasks], example, heads=heads), **options)


def batch_of(task: Task, count: int) -> Batch:
    return task.train.take(torch.arange(count), torch.tensor(0), torch.tensor(1), count)


def test_the_options_make_the_memory():
    tasks = toy_tasks(2)
    assert isinstance(make_er(tasks).memory, Reservoir)
    assert len(make_er(tasks, memory=7).memory.y) == 1 + 7
    ring = make_er(tasks, kind="ring", per_class=4).memory
    assert isinstance(ring, Ring)
    assert len(ring.y) == 1 + 4 * 6


def test_the_loss_is_the_mean_over_batch_and_replay():
    """Every example by its own head, in one batch, against a plain loop in float64."""
    tasks = toy_tasks(3)
    er = make_er(tasks, replay=6)
    for task in tasks[:2]:
        er.memory.expect(20)
        batch = batch_of(task, 20)
        er.memory.add(batch.x, batch.y, task.index)
    batch = batch_of(tasks[2], 9)
    torch.manual_seed(3)
    loss = er.loss(batch)
    torch.manual_seed(3)
    x, y, task, _ = er.memory.sample(6)
    assert set(task.tolist()) == {0, 1}
    er.double()
    pairs = [(batch.x[i], batch.y[i], 2) for i in range(9)] + [(x[i], y[i], int(task[i])) for i in range(6)]
    expected = sum(-F.log_softmax(er.net(image[None].double(), k), 1)[0, label] for image, label, k in pairs) / 15
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("norm", [False, True])
def test_while_the_memory_is_empty_the_batch_counts_alone(norm):
    tasks = toy_tasks(2)
    er = make_er(tasks, norm=norm, replay=8).train()
    batch = batch_of(tasks[1], 8)
    loss = er.loss(batch)
    if norm:
        mean = er.net.trunk[1](batch.x.flatten(1)).mean(0)
        torch.testing.assert_close(er.net.trunk[2].running_mean, 0.1 * mean.detach(), msg="blank images are not counted")
        er.net.trunk[2].reset_running_stats()
    expected = F.cross_entropy(er.net(batch.x, 1), batch.y)
    torch.testing.assert_close(loss, expected)


def test_the_memory_sees_every_example_once_in_several_epochs():
    tasks = toy_tasks(2)
    er = make_er(tasks, memory=20)
    learn(er, tasks, Trainer(Regime(epochs=3, batch=7, lr=0.1)))
    assert er.memory.seen.item() == sum(len(task.train) for task in tasks)
    assert er.memory.new.item() == 0
    assert er.memory.used.sum().item() == 20
    assert er.memory.tasks() == {0, 1}
    for k in range(1, 21):  # what is kept is an image of its task, with its label
        train = tasks[int(er.memory.task[k])].train
        same = (train.inputs(torch.arange(len(train))) == er.memory.x[k]).flatten(1).all(1)
        assert train.y[same].tolist() == [er.memory.y[k].item()]


def test_a_batch_is_offered_after_its_loss():
    tasks = toy_tasks(1)
    er = make_er(tasks)
    er.memory.expect(10)
    batch = batch_of(tasks[0], 10)
    er.loss(batch)
    assert not er.memory.used.any()
    er.edit_grads(batch, None)
    assert er.memory.used.sum().item() == 10


@pytest.mark.parametrize("kind", ["reservoir", "ring"])
def test_replay_forgets_less_than_sgd(kind):
    tasks, accuracies = toy_tasks(8), []
    er = make_er(tasks, heads="shared", kind=kind, memory=72, per_class=3)
    for method in (er, METHODS["sgd"](make_er(tasks, heads="shared").net)):
        learn(method, tasks, Trainer(Regime(epochs=6, batch=8, lr=0.2)))
        accuracies.append(sum(evaluate(method, task.test).accuracy for task in tasks) / 8)
    assert accuracies[0] > accuracies[1] + 0.1


def test_heads_to_come_are_left_alone():
    """A batch of mixed tasks passes through all heads; weight decay must not move those that nothing was learned with."""
    tasks = toy_tasks(3)
    er = make_er(tasks)
    before = [p.clone() for p in er.net.heads[2].parameters()]
    learn(er, tasks[:2], Trainer(Regime(epochs=2, batch=16, optimizer="adamw", weight_decay=0.1, lr=0.01)))
    assert all(torch.equal(p, q) for p, q in zip(er.net.heads[2].parameters(), before, strict=True))
    first = er.net.heads[0].weight.clone()
    learn(er, tasks[2:], Trainer(Regime(epochs=1, batch=16)))
    assert not torch.equal(first, er.net.heads[0].weight), "the heads of earlier tasks go on learning"


def test_the_memory_is_part_of_the_checkpoint():
    tasks = toy_tasks(2)
    er, twin = make_er(tasks), make_er(tasks)
    learn(er, tasks[:1])
    twin.load_state_dict(er.state_dict())
    for one in (er, twin):
        learn(one, tasks[1:])
    assert torch.equal(logits(er, tasks[0]), logits(twin, tasks[0]))


def test_one_head_for_all():
    tasks = toy_tasks(3)
    er = make_er(tasks, heads="shared", kind="ring", per_class=2)
    learn(er, tasks)
    assert er.memory.tasks() == {0, 1, 2}
    assert er.memory.used.sum().item() == 2 * 9


@pytest.mark.parametrize("wrong", [{"memory": 0}, {"replay": 0}, {"kind": "heap"}, {"per_class": 1.5}])
def test_wrong_options(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        make_er(toy_tasks(1), **wrong)
