"""Augmentation by the Trainer: the bits of the benchmarks' option, functions of the user's own, and what is refused."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from hatrack import Method, Network, Regime, Task, Trainer
from hatrack.networks.mlp import mlp
from tests.helpers.learning import learn, make
from tests.helpers.streams import streamed
from tests.helpers.toys import toy_tasks

SHAPE = (1, 8, 8)


class Witness(Method):
    """Keeps the images of every step."""

    def loss(self, batch):
        self.__dict__.setdefault("seen", []).append(batch.x.clone())
        return super().loss(batch)


def watched(task, *, seed=0, epochs=2, **trainer):
    """Learn a task; return the images of all steps, the state, and the fit."""
    torch.manual_seed(0)
    method = Witness(Network(mlp(task.shape, widths=(8,), dropout=0.5), tasks=[task]))
    fit = Trainer(Regime(epochs=epochs, batch=16, lr=0.1), seed=seed, **trainer)
    method.learn(task, fit)
    return torch.cat(method.seen), method.state_dict(), fit


def same(one, two):
    return all(torch.equal(a, b) for a, b in zip(one.values(), two.values(), strict=True))


@pytest.mark.parametrize("name", ["sgd", "hat", "er", "joint"])
def test_crops_and_flips_are_those_of_the_option_of_benchmarks(name):
    tasks = toy_tasks(2, shape=SHAPE)
    old = [replace(task, train=replace(task.train, augment=True)) for task in tasks]
    found = []
    regime = Regime(epochs=3, batch=16, lr=0.1)
    cropped = replace(regime, augment="crop-flip")
    for world, trainer in (
        (old, Trainer(regime)),
        (tasks, Trainer(regime, augment="crop-flip")),
        ([streamed(t) for t in tasks], Trainer(regime, augment="crop-flip")),
        (tasks, Trainer(cropped)),
        (tasks, Trainer(regime)),
    ):
        method = make(name, world)
        learn(method, world, trainer)
        found.append(method.state_dict())
    assert same(found[0], found[1])
    assert same(found[0], found[2]), "streamed images are cropped like others"
    assert same(found[0], found[3]), "the regime says the same"
    assert not same(found[0], found[4])


def test_a_function_of_the_users_own_sees_every_batch():
    task = toy_tasks(1, shape=SHAPE)[0]
    plain, _, _ = watched(task)
    seen, _, fit = watched(task, augment=lambda x: x + 1)
    assert torch.equal(seen, plain + 1)
    assert fit.fits[0].engine == "eager"


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: x + torch.rand(len(x), 1, 1, 1),
        lambda x: x + torch.from_numpy(np.random.rand(len(x), 1, 1, 1)),
        lambda x: x + random.random(),
    ],
)
def test_what_it_draws_depends_on_the_seed_alone(draw):
    task = toy_tasks(1, shape=SHAPE)[0]
    plain, _, _ = watched(task)
    seen, state, _ = watched(task, augment=draw)
    np.random.seed(1)
    random.seed(1)
    again, same_state, _ = watched(task, augment=draw)
    other, _, _ = watched(task, augment=draw, seed=1)
    assert torch.equal(seen, again)
    assert same(state, same_state)
    assert not torch.equal(seen, other)
    added = (seen - plain).flatten(1)[:, 0]
    first, second = added.chunk(2)  # two epochs
    assert not torch.equal(first, second)


def test_dropout_goes_on_as_if_nothing_was_drawn():
    task = toy_tasks(1, shape=SHAPE)[0]

    def draw(x):
        torch.rand(100)
        return x

    assert same(watched(task)[1], watched(task, augment=draw)[1])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"augment": "crop-flop"}, "did you mean 'crop-flip'"),
        ({"augment": 3}, "a function"),
        ({"augment": torch.flip, "engine": "compiled"}, "engine"),
    ],
)
def test_wrong_arguments_are_an_error_in_one_line(given, said):
    with pytest.raises(ValueError, match=rf"^[^\n]*augment[^\n]*{said}[^\n]*$"):
        Trainer(**given)


@pytest.mark.parametrize("function", [lambda x: x[:, :, :4], lambda x: None])
def test_a_function_must_keep_the_shape(function):
    with pytest.raises(ValueError, match=r"^augment must return images[^\n]*\(16, 1, 8, 8\)[^\n]*$"):
        watched(toy_tasks(1, shape=SHAPE)[0], augment=function)


def test_crops_are_for_images():
    words = Task.from_arrays(0, "words", np.zeros((6, 4), int), np.arange(6) % 2, *[np.zeros((6, 4), int), np.arange(6) % 2],
                             tokens=True)  # fmt: skip
    for task in (toy_tasks(1, shape=(16,))[0], words):
        method = Method(Network(torch.nn.Linear(task.shape[0], 4), [task.classes], task.train.x[:2].float()))
        with pytest.raises(ValueError, match=r"crop-flip' is for images|token ids"):
            method.learn(task, Trainer(Regime(epochs=1), augment="crop-flip"))
        with pytest.raises(ValueError, match=r"is for images|token ids"):
            method.learn(task, Trainer(Regime(epochs=1, augment="crop-flip")))
