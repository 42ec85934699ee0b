"""Every method on streamed tasks: the same bits as on tasks in memory, with and without a batch norm."""

import pytest
import torch
from torch import nn

from hatrack import METHODS, Network, Regime, Trainer, evaluate, in_scenario
from hatrack.methods.evaluate import without_task_ids
from hatrack.seeds import seeded
from tests.helpers.learning import ISOLATED, UNTRAINED, learn, make
from tests.helpers.streams import streamed, streamed_toys
from tests.helpers.tiers import QUICK, quick_and_slow
from tests.helpers.toys import toy_tasks


@pytest.mark.parametrize("name", quick_and_slow(METHODS, QUICK))
def test_a_streamed_task_is_learned_to_the_same_bits(name):
    worlds, found = (toy_tasks(2), streamed_toys(2)), []
    for tasks in worlds:
        method = make(name, tasks)
        fit = learn(method, tasks, Trainer(Regime(epochs=20, batch=8, lr=0.1)))
        scores = [evaluate(method, part) for task in tasks for part in (task.train, task.valid, task.test)]
        if name in ISOLATED:
            for task in tasks:
                method.fit_router(task)
        guessed = without_task_ids(method, [task.test for task in tasks], [0, 1])
        found.append((method.state_dict(), scores, guessed, [one.to_dict() for one in fit.fits], method.kept_bytes()))
    assert all(task.train.stream is not None and task.train.x.is_meta for task in worlds[1])
    assert found[0][1:] == found[1][1:]
    assert found[0][0].keys() == found[1][0].keys()
    assert all(torch.equal(value, found[1][0][key]) for key, value in found[0][0].items())
    assert name in UNTRAINED or found[0][1][-1].accuracy > 0.8, "it learned something"


@pytest.mark.parametrize("name", quick_and_slow(METHODS, QUICK))
def test_every_method_learns_from_random_transforms(name):
    """What is read twice is not the same, and nothing comes to harm."""
    tasks = streamed_toys(2, noise="torch")
    states = []
    for _ in range(2):
        method = make(name, tasks)
        learn(method, tasks, Trainer(Regime(epochs=2, batch=16, lr=0.05)))
        states.append(method.state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.parametrize("name", ["hat", "pmask", "packnet", "joint", "ewc"])
def test_statistics_of_norms_are_the_same(name):
    states = []
    for tasks in (toy_tasks(2), [streamed(task) for task in toy_tasks(2)]):
        with seeded(0, "weights"):
            trunk = nn.Sequential(
                nn.Flatten(), nn.Linear(16, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU()
            )
        method = METHODS[name](Network(trunk, tasks=tasks))
        learn(method, tasks)
        states.append(method.state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_tasks_in_memory_and_streamed_ones_are_trained_together():
    """Joint training mixes them in every batch."""
    tasks = toy_tasks(2)
    found = []
    for world in (tasks, [tasks[0], streamed(tasks[1])], [streamed(tasks[0], workers=2), tasks[1]]):
        method = make("joint", world)
        learn(method, world, Trainer(Regime(epochs=2, batch=16, lr=0.05)))
        found.append(method.state_dict())
    for other in found[1:]:
        assert all(torch.equal(found[0][key], other[key]) for key in found[0])


@pytest.mark.parametrize("name", ["sgd", "er", "agem"])
def test_other_scenarios(name):
    """The labels of a task count on from those before it, whatever the data set says."""
    found = []
    for tasks in (toy_tasks(2), streamed_toys(2)):
        world = in_scenario(tasks, "class")
        method = make(name, world, heads="class")
        learn(method, world)
        found.append((method.state_dict(), [evaluate(method, task.test) for task in world]))
    assert found[0][1] == found[1][1]
    assert all(torch.equal(found[0][0][key], found[1][0][key]) for key in found[0][0])
