"""Logits of batches that mix tasks: against a plain loop, and what they cost after many tasks."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hatrack import Network, Regime, Trainer
from hatrack.methods.modes import evaluation_mode
from hatrack.networks.heads import by_task, heads_by_task
from tests.helpers.learning import make
from tests.helpers.toys import toy_tasks

LOW = torch.finfo(torch.float64).min


def heads_of(sizes, kind=torch.float64):
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(6, size, dtype=kind) for size in sizes])


@pytest.mark.parametrize("sizes", [[3, 5, 2], [4] * 7, [1], [2, 2, 3]], ids=str)
def test_every_example_has_the_logits_and_gradients_of_its_own_head(sizes):
    heads, x = heads_of(sizes), torch.randn(20, 6, dtype=torch.float64, requires_grad=True)
    task = torch.arange(20) % len(sizes)
    logits = heads_by_task(heads, x, task)
    for row, example, k in zip(logits, x, task.tolist(), strict=True):
        assert (row[sizes[k] :] == LOW).all()
        torch.testing.assert_close(row[: sizes[k]], heads[k].weight @ example + heads[k].bias)
    tensors, y = [*heads.parameters(), x], torch.zeros(20, dtype=torch.int64)
    found = torch.autograd.grad(F.cross_entropy(logits, y), tensors)
    loop = sum(F.cross_entropy(heads[k](x[i : i + 1]), y[:1]) for i, k in enumerate(task.tolist())) / 20
    for one, two in zip(found, torch.autograd.grad(loop, tensors), strict=True):
        torch.testing.assert_close(one, two)


def test_missing_classes_are_finite_in_bfloat16():
    heads, x, task = heads_of([2, 3], torch.float32), torch.randn(4, 6), torch.tensor([0, 1, 0, 1])
    with torch.autocast("cpu", torch.bfloat16):
        logits, old = heads_by_task(heads, x, task), by_task([head(x) for head in heads], task)
    assert logits.dtype == old.dtype == torch.bfloat16
    assert logits.isfinite().all()
    torch.testing.assert_close(logits, old)


class Count(TorchDispatchMode):
    """How many operations there are."""

    operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        return func(*args, **(kwargs or {}))


def test_the_operations_do_not_grow_with_the_tasks():
    counts = []
    for tasks in (2, 50):
        heads, x, task = heads_of([4] * tasks), torch.zeros(3, 6, dtype=torch.float64), torch.tensor([0, 1, 0])
        with Count() as count, torch.no_grad():
            heads_by_task(heads, x, task)
        counts.append(count.operations)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("heads", ["multi", "shared"])
def test_a_network_runs_with_other_tensors(heads):
    trunk = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.BatchNorm1d(6))
    net = Network(trunk, [3, 3], torch.zeros(2, 1, 2, 2), heads=heads).eval()
    names = ["trunk.1.weight", "trunk.2.running_mean", *(["heads.0.bias"] if heads == "shared" else [])]
    own = dict([*net.named_parameters(), *net.named_buffers()])
    x, before = torch.randn(5, 1, 2, 2), {name: own[name].clone() for name in names}
    other = {name: torch.randn_like(own[name]) for name in names}
    found = net.run_with(other, x, 1)
    assert all(torch.equal(own[name], before[name]) for name in names)
    assert torch.equal(found, torch.func.functional_call(net, other, (x, 1)))
    assert not torch.equal(found, net(x, 1))


def test_a_callback_may_ask_for_tasks_that_come_later():
    tasks, asked = toy_tasks(3), []
    method = make("er", tasks)
    x, task = tasks[0].test.inputs(torch.arange(3)), torch.tensor([0, 1, 2])

    def ask(_):
        with torch.no_grad():
            method(x, task)  # in training mode, with dropout
        with evaluation_mode(method):
            asked.append((method(x, task), torch.stack([method(x[k : k + 1], k)[0] for k in range(3)])))

    method.learn(tasks[0], Trainer(Regime(epochs=1, batch=10), progress=ask))
    for mixed, single in asked:
        torch.testing.assert_close(mixed, single)
    assert asked
