"""What fits cost: operations against values worked out by hand, numbers of steps and examples, and memory."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hatrack as hr
from hatrack.engine import compiled
from hatrack.methods.fit import FitResult
from hatrack.training import counting, fit_costs
from hatrack.training.counting import FlopCount, count_trial_step, countable, held_bytes
from hatrack.training.fit_loop import FitLoop
from tests.helpers.toys import toy_tasks


def counted(network, x):
    """Return the operations of a forward and a backward pass."""
    count = FlopCount()
    with count:
        network(x).square().sum().backward()
    return count.total


@pytest.mark.parametrize("batch", [1, 7])
def test_a_perceptron_by_hand(batch):
    network = nn.Sequential(nn.Linear(20, 12), nn.ReLU(), nn.Linear(12, 5))
    # A product of (m, k) and (k, n) takes 2 m k n operations. Each layer has one forward and one for the gradient of its
    # weights; the second has one more for the gradient of its input, which the first layer's input, data, does not need.
    first, second = 2 * batch * 20 * 12, 2 * batch * 12 * 5
    assert counted(network, torch.randn(batch, 20)) == 2 * first + 3 * second


def test_a_convolution_by_hand():
    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, stride=2))
    # 10 x 10 outputs of 8 channels from 3 x 3 x 3 numbers each; then 4 x 4 outputs of 4 channels from 3 x 3 x 8 numbers
    first, second = 2 * 6 * (10 * 10) * 8 * (3 * 3 * 3), 2 * 6 * (4 * 4) * 4 * (3 * 3 * 8)
    forward = FlopCount()
    with forward, torch.no_grad():
        network(torch.randn(6, 3, 10, 10))
    assert forward.total == first + second
    # The gradient of the weights takes as many; that of the input is that of a transposed convolution.
    assert counted(network, torch.randn(6, 3, 10, 10)) == 2 * first + 3 * second


def test_attention_by_hand():
    q, k, v = (torch.randn(2, 3, 10, 4, requires_grad=True) for _ in range(3))
    count = FlopCount()
    with count:
        F.scaled_dot_product_attention(q, k, v)
    assert count.total == 2 * (2 * 2 * 3 * 10 * 10 * 4)  # scores, and the mean of the values


def test_an_operation_that_no_formula_counts_makes_the_count_unknown(monkeypatch):
    count = FlopCount()
    with count:
        torch.ones(2, 3) @ torch.ones(3, 4)
        assert count.total == 2 * 2 * 3 * 4
        monkeypatch.setattr(counting, "UNCOUNTED", {torch.ops.aten.add})  # as the fused recurrent layers are
        torch.ones(2) + torch.ones(2)
    assert count.total is None


def test_compiled_parts_are_not_counted():
    network = nn.Sequential(nn.Linear(2, 2))
    assert countable(network)
    network[0]._compiled_call_impl = network[0].forward  # as `network[0].compile()` leaves it
    assert not countable(network)


def loop_on(task, tasks, **regime):
    method = hr.Method(
        hr.Network(nn.Sequential(nn.Flatten(), nn.Linear(task.train.inputs(torch.tensor([0])).numel(), 6)), tasks=tasks)
    )
    return FitLoop(method, task, hr.Regime(**regime), {}, 0, count_costs=True)


def test_a_trial_step_leaves_no_trace():
    tasks = toy_tasks()
    loop = loop_on(tasks[0], tasks, optimizer="momentum", batch=8)
    loop.method.train()
    index = torch.arange(8)
    inputs = (*loop.prefetcher.split.fetch(index), torch.tensor(0))
    before = {name: tensor.clone() for name, tensor in loop.state()[0].items()}
    flops = count_trial_step(loop.train_step, inputs, loop.method)
    features, classes = 6, tasks[0].classes
    size = tasks[0].train.inputs(torch.tensor([0])).numel()
    assert flops == 2 * (2 * 8 * size * features) + 3 * (2 * 8 * features * classes)
    after = loop.state()[0]
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert all(parameter.grad is None for parameter in loop.method.parameters())


@pytest.mark.parametrize("batch", [8, 7])
def test_the_costs_of_a_fit(batch):
    tasks = toy_tasks()
    loop = loop_on(tasks[0], tasks, optimizer="adam", epochs=3, batch=batch, schedule="constant")
    while not loop.finished:
        loop.epoch()
    examples = len(tasks[0].train)
    steps = len(torch.arange(examples).split(batch)) - (examples % batch == 1)
    size = tasks[0].train.inputs(torch.tensor([0])).numel()
    result: FitResult = loop.result
    assert (result.steps, result.examples) == (3 * steps, 3 * examples)
    per_example = 2 * (2 * size * 6) + 3 * (2 * 6 * tasks[0].classes)
    assert result.flops == 3 * examples * per_example, "also with a last batch of another size"
    # Adam: the weights, their gradients, two averages of each and a number of steps per tensor
    weights = list(loop.method.parameters())
    buffers = sum(buffer.nbytes for buffer in loop.method.buffers())
    assert result.peak_bytes == 4 * sum(p.nbytes for p in weights) + 4 * len(weights) + buffers
    assert result.peak_bytes == held_bytes(loop.method, loop.optimizers.all)


def test_the_teacher_of_lwf_is_held_as_well():
    tasks = toy_tasks()
    method = hr.LwF(hr.Network(nn.Sequential(nn.Flatten(), nn.Linear(16, 6)), tasks=tasks))
    before = held_bytes(method, [])
    method.teacher = [copy.deepcopy(method.net)]
    assert held_bytes(method, []) == before + sum(t.nbytes for t in (*method.net.parameters(), *method.net.buffers()))


def test_a_trainer_of_users_counts_steps_only():
    tasks = toy_tasks()
    method = hr.Method(hr.Network(nn.Flatten(), tasks=tasks))
    trainer = hr.Trainer(hr.Regime(epochs=2, batch=8, schedule="constant"), progress=False)
    method.learn(tasks[0], trainer)
    (fit,) = trainer.fits
    assert fit.examples == 2 * len(tasks[0].train)
    assert fit.flops is None
    assert fit.peak_bytes is None


@pytest.mark.parametrize(("classes", "counted"), [((3, 3, 3), 1), ((2, 5, 2), 2)])
def test_the_operations_of_compiled_steps_are_counted_once_and_are_those_of_eager_ones(classes, counted, monkeypatch):
    """Three tasks take one code. The last batch of an epoch is smaller and runs eagerly: it is counted as it is done.
    Classes that a task does not have are not counted."""
    monkeypatch.setattr(compiled, "compile_graph", lambda graph, *_: copy.deepcopy(graph))
    monkeypatch.setattr(compiled, "_code_cache", {})
    trials, found = [], {}
    monkeypatch.setattr(fit_costs, "count_trial_step", lambda *given: trials.append(1) or count_trial_step(*given))
    for engine in ("eager", "compiled"):
        tasks = [toy_tasks(3, classes=count)[k] for k, count in enumerate(classes)]
        method = hr.HAT(hr.Network(nn.Sequential(nn.Flatten(), nn.LazyLinear(7), nn.ReLU()), tasks=tasks))
        fit = hr.Trainer(hr.Regime(epochs=2, batch=len(tasks[0].train) // 2 - 1), progress=False, engine=engine)
        fit.count_costs = True
        for task in tasks:
            method.learn(task, fit)
        found[engine] = [(result.flops, result.steps, result.examples) for result in fit.fits]
        assert all(flops for flops, _, _ in found[engine])
    assert found["eager"] == found["compiled"]
    assert (len(trials), len(compiled._code_cache)) == (counted, 1)
