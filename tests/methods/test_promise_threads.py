"""Predictions from several threads are right and leave the model as it was; `for_task` gives a module for serving."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread

import pytest
import torch
from torch import nn

from hatrack import METHODS, Network, Regime, Trainer
from tests.helpers.learning import MULTI_ONLY, UNTRAINED, learn, logits, make
from tests.helpers.tiers import QUICK, every_value, quick_and_slow
from tests.helpers.toys import toy_tasks

EXCHANGING = ["hat", "pmask", "packnet", "pnn", "independent"]
CALLS = 300


def with_norms(name, tasks):
    """A method on a network whose norms each task has for itself, so that prediction exchanges tensors."""
    torch.manual_seed(0)
    norm = [] if name == "pnn" else [nn.BatchNorm1d(24)]  # pnn refuses them
    trunk = nn.Sequential(nn.Flatten(), nn.Linear(16, 24), *norm, nn.ReLU(), nn.Linear(24, 24), nn.Sigmoid())
    return METHODS[name](Network(trunk, tasks=tasks))


@pytest.mark.parametrize(("training", "name"), every_value([False, True], EXCHANGING))
def test_threads_get_the_answers_of_one(name, training):
    tasks = toy_tasks(2)
    method = with_norms(name, tasks)
    learn(method, tasks)
    right = [method.predict(task.test.x, task.index) for task in tasks]
    state = {key: value.clone() for key, value in method.state_dict().items()}
    method.train(training)  # `predict` sets evaluation mode, which is one for all threads

    def ask(number):
        task = tasks[number % 2]
        return method.predict(task.test.x, task.index)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(CALLS)))
    assert sum(not torch.equal(answer, right[number % 2]) for number, answer in enumerate(answers)) == 0
    assert method.training == training
    assert [key for key, value in method.state_dict().items() if not torch.equal(value, state[key])] == []


def test_a_prediction_waits_until_a_task_is_learned():
    tasks = toy_tasks(2)
    method, begun, answers = with_norms("hat", tasks), Event(), []
    learn(method, tasks[:1])
    right = method.predict(tasks[0].test.x, 0)
    fit = Trainer(Regime(epochs=30, batch=4, lr=0.1), progress=lambda event: begun.set())
    thread = Thread(target=method.learn, args=(tasks[1], fit))
    thread.start()
    begun.wait()
    while thread.is_alive():
        answers.append(method.predict(tasks[0].test.x, 0))
    thread.join()
    assert 1 in method.history
    assert answers
    assert all(torch.equal(answer, right) for answer in answers)


@pytest.mark.parametrize("name", quick_and_slow(METHODS, (*QUICK, "er", "packnet", "pmask", "pnn")))
@pytest.mark.parametrize("heads", ["multi", pytest.param("shared", marks=pytest.mark.slow)])
def test_a_module_of_one_task_answers_like_the_method(name, heads):
    if name in MULTI_ONLY and heads == "shared":
        pytest.skip("it needs a head per task")
    tasks = toy_tasks(3)
    method = make(name, tasks, heads=heads)
    learn(method, tasks[:2])
    models = [method.for_task(task.index) for task in tasks[:2]]
    then = [logits(method, task) for task in tasks[:2]]
    learn(method, tasks[2:])
    method.train()
    for task, model, right in zip(tasks, models, then, strict=False):
        images = task.test.inputs(torch.arange(len(task.test)))
        assert torch.allclose(model.train()(images), right, rtol=0, atol=1e-5), "it stays in evaluation mode"
        assert not any(p.requires_grad for p in model.parameters())
    assert name in UNTRAINED or not torch.equal(then[0], then[1])


@pytest.mark.parametrize("name", EXCHANGING)
def test_threads_may_share_a_module_of_one_task(name):
    tasks = toy_tasks(2)
    method = with_norms(name, tasks)
    learn(method, tasks)
    models = [method.for_task(task.index) for task in tasks]
    images = [task.test.inputs(torch.arange(len(task.test))) for task in tasks]
    right = [model(x) for model, x in zip(models, images, strict=True)]
    assert all(torch.allclose(logits(method, task), r, rtol=0, atol=1e-5) for task, r in zip(tasks, right, strict=True))
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda number: models[number % 2](images[number % 2]), range(CALLS)))
    assert sum(not torch.equal(answer, right[number % 2]) for number, answer in enumerate(answers)) == 0


def test_an_error_in_the_trunk_leaves_the_model_as_it_was():
    tasks = toy_tasks(2)
    method = with_norms("hat", tasks)
    learn(method, tasks)
    right = logits(method, tasks[1])
    with pytest.raises(RuntimeError):
        method(torch.zeros(2, 1, 5, 5), 1)
    assert torch.equal(logits(method, tasks[1]), right)
