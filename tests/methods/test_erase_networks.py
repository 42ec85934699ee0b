"""Erasing tasks of random networks: convolutional ones, transformers and recurrent ones, bit for bit."""

import pytest
import torch

from hatrack import METHODS, Network
from hatrack.tracing.units import Units
from tests.helpers.erasing import OPTIMIZERS, different, snapshot, trainer
from tests.helpers.nets import random_plan
from tests.helpers.recurrent import recurrent_plan
from tests.helpers.tiers import cases, every_value
from tests.helpers.toys import toy_tasks
from tests.helpers.transformers import random_transformer

PLANS = {"convolutional": random_plan, "transformer": random_transformer, "recurrent": recurrent_plan}
NUMBERS = [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, cases(8, 40)))]
pytestmark = [
    pytest.mark.filterwarnings("ignore:task .* finds under:UserWarning"),  # networks so small are soon full
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported"),  # torch says so once per process
    pytest.mark.filterwarnings("ignore:.* held whole after the first task:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:traces of task 0 .'toy 0'. (may )?remain after it is erased. images of it:UserWarning"
    ),
    pytest.mark.parametrize(("kind", "name"), every_value(PLANS, ["hat", "pmask"])),
    pytest.mark.parametrize("number", NUMBERS),
]


def case(kind, number):
    """A random plan and tasks for it."""
    plan = PLANS[kind](number)
    while kind == "transformer" and plan.tokens:  # these tasks have images
        number += 1000
        plan = PLANS[kind](number)
    shape = {"convolutional": (3, 8, 8), "transformer": (1, 8, 8)}.get(kind) or (1, plan.steps, 4)
    return plan, toy_tasks(3, shape=shape, train=20, test=8), list(OPTIMIZERS)[number % len(OPTIMIZERS)]


def test_erasing_the_last_task_gives_the_network_from_before_it(name, kind, number):
    plan, tasks, optimizer = case(kind, number)
    method, states = METHODS[name](Network(plan.build(), tasks=tasks), free="initial"), []
    states.append(snapshot(method))
    for task in tasks:
        method.learn(task, trainer(optimizer))
        states.append(snapshot(method))
    for task in (2, 1, 0):
        method.release(task, erase=True)
        assert not different(snapshot(method), states[task])


def test_erasing_any_task_gives_the_run_that_left_it_out(name, kind, number):
    plan, tasks, optimizer = case(kind, number)
    whole, other = without_reuse(name, plan, tasks), without_reuse(name, plan, tasks)
    left_out = number % 3
    for task in tasks:
        whole.learn(task, trainer(optimizer))
        if task.index != left_out:
            other.learn(task, trainer(optimizer))
    whole.release(left_out, erase=True)
    assert not different(snapshot(whole), snapshot(other))


def without_reuse(name, plan, tasks):
    """A method on a random network; what it would refuse, because it is held whole or has too few weights, is frozen."""
    trunk = plan.build()
    held = Units(trunk, tasks[0].train.inputs(torch.arange(2))).held_whole()
    for key, parameter in trunk.named_parameters():
        if key in held or parameter.numel() < len(tasks):
            parameter.requires_grad_(False)
    return METHODS[name](Network(trunk, tasks=tasks), reuse="never")
