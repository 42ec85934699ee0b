"""What docs/guarantees.md guarantees on a CPU, cell by cell; tests/gpu/test_guarantees.py has the others."""

import copy
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from hatrack import HAT, Method, Network, Regime, Trainer, run
from hatrack.engine import compiled, decompositions
from hatrack.engine.choice import can_compile
from hatrack.seeds import seeded
from tests.helpers.killing import assert_same, killed_at, spec, to_the_end
from tests.helpers.learning import logits
from tests.helpers.pictures import HARD, assert_same_bits, convolutional, learned, pictures


@contextmanager
def threads(number: int):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.slow)])  # two wait for each other beside other work
def test_eager(number):
    with threads(number):
        (one, unchanged), (two, _) = learned("eager"), learned("eager")
    assert unchanged
    assert_same_bits(one, two)


def test_another_number_of_threads_changes_no_weight_of_an_earlier_task():
    """The logits of one number of threads may differ from those of another in rounding; each stays what it was."""
    tasks = pictures()
    method = convolutional(tasks)
    fit = Trainer(Regime(epochs=1, batch=16, **HARD), engine="eager")  # two threads wait for each other beside other work
    with threads(1):
        method.learn(tasks[0], fit)
    before = {}
    for number in (1, 2):
        with threads(number):
            before[number] = logits(method, tasks[0])
    own = {key: value.clone() for key, value in method.used_by(0).items()}
    with threads(2):
        for task in tasks[1:]:
            method.learn(task, fit)
    for key, value in method.used_by(0).items():
        assert torch.equal(value, own[key]), key
    for number, expected in before.items():
        with threads(number):
            assert torch.equal(logits(method, tasks[0]), expected)


@pytest.mark.slow
@pytest.mark.skipif(not can_compile(gpu=False), reason="no C++ compiler")
def test_compiled():
    (one, unchanged), (two, _) = learned("compiled"), learned("compiled")
    assert unchanged
    assert_same_bits(one, two)


@pytest.mark.slow
def test_killed_and_resumed_while_compiled(tmp_path, monkeypatch):
    """With captured operations that are not compiled: the compiler itself has no state of a run."""
    monkeypatch.setattr(compiled, "compile_graph", lambda graph, *_: copy.deepcopy(graph))
    monkeypatch.setattr(compiled, "_code_cache", {})
    whole = run(spec("hat", batch=64), tmp_path / "whole", engine="compiled")
    graphs = len(compiled._code_cache)
    kills = killed_at(monkeypatch, 0.2, seed=0, most=4)
    again = to_the_end(spec("hat", batch=64), tmp_path / "again", save_every=1e-5, engine="compiled")
    assert len(kills) == 4
    assert_same(whole, again)
    assert len(compiled._code_cache) == graphs, "nothing was compiled a second time"


class LeNet(nn.Module):
    """Its `view` does not work with images whose channels are last in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 8, 3), nn.Linear(72, 20)

    def forward(self, x):
        x = self.two(nn.functional.max_pool2d(self.one(x).relu(), 2)).relu()
        return self.three(x.view(len(x), -1)).relu()


class Halves(nn.Module):
    """The gradient of each convolution is a slice of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Conv2d(3, 5, 3), nn.Conv2d(3, 5, 3), nn.Conv2d(5, 4, 3)

    def forward(self, x):
        return self.three(torch.cat([self.one(x), self.two(x.flip(3))])).reshape(2, len(x), -1).mean(0)


class Teacher(Method):
    """A copy sees the images as they are, and the network sees them darker, in the same memory."""

    def __init__(self, net: Network) -> None:
        super().__init__(net)
        self.old = copy.deepcopy(net.trunk).requires_grad_(False)

    def loss(self, batch):
        with torch.no_grad():
            old = self.old(batch.x)
        batch.x.mul_(0.2)
        return super().loss(batch) + (self.net.trunk(batch.x) - old).square().mean()


def small() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(600, 20))


def usual() -> nn.Module:
    return convolutional(pictures(1), dropout=0.0).net.trunk


@pytest.mark.parametrize(
    ("trunk", "kind"),
    [(usual, HAT), (usual, Method), (LeNet, Method), (Halves, Method), (small, Teacher)],
    ids=["hat", "batch norm", "view", "slices", "changed in place"],
)
def test_steps_captured_for_a_gpu_are_the_same_steps(trunk, kind, monkeypatch):
    """On a CPU, and not compiled. Without dropout, which follows the order of images in memory."""
    monkeypatch.setattr(compiled, "compile_graph", lambda graph, *_: copy.deepcopy(graph))
    monkeypatch.setattr(compiled, "_code_cache", {})
    monkeypatch.setattr(decompositions, "on_gpu", lambda x: True)
    by_patches, used = decompositions.by_patches, []
    monkeypatch.setattr(decompositions, "by_patches", lambda *given: used.append(given[0].shape[1]) or by_patches(*given))
    states = []
    for engine in ("eager", "compiled"):
        task = pictures(1)[0]
        with seeded(0, "weights"):
            method = kind(Network(trunk(), [task.classes], task.train.inputs(torch.arange(2))))
        fit = Trainer(Regime(epochs=2, batch=16, lr=0.02), engine=engine)
        method.learn(task, fit)
        assert fit.fits[0].engine == engine
        states.append(method.state_dict())
    assert set(used) == {3}, "the convolutions of images only"
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=1e-3, atol=1e-4)
