"""Weights that ask for care: complex and sparse ones, and those that a trunk divides by."""

import pytest
import torch
from torch import nn

import hatrack as hr
from hatrack import METHODS, Network, Regime, Trainer, evaluate
from hatrack.methods.parts.divisors import divisors
from hatrack.methods.parts.freeze import Freeze
from tests.helpers.learning import learn, logits
from tests.helpers.tiers import quick_and_slow
from tests.helpers.toys import toy_tasks

FIT = Regime(epochs=8, batch=16, optimizer="adamw", lr=0.01)
MOMENTUM = Regime(epochs=20, batch=8, optimizer="momentum", lr=0.05)


class Temperature(nn.Module):
    """A trunk that divides by a learned temperature and by learned sizes, and multiplies by learned scales."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.tau = nn.Linear(16, 24), nn.Linear(24, 24), nn.Parameter(torch.ones(1))
        self.sizes, self.scales = nn.Parameter(torch.ones(24)), nn.Parameter(torch.ones(24))

    def forward(self, x):
        return torch.relu(self.b(torch.tanh(self.a(x.flatten(1)) / self.tau) * self.scales) / self.sizes)


@pytest.mark.parametrize("seed", range(4))
def test_pmask_learns_a_temperature_of_its_own_for_every_task(seed):
    tasks = toy_tasks(3)
    torch.manual_seed(seed)
    net = Network(Temperature(), tasks=tasks, seed=seed)
    assert divisors(net) == ["tau", "sizes"]
    method = METHODS["pmask"](net)
    answers = []
    for task in tasks:
        learn(method, [task], Trainer(FIT))
        answers.append(logits(method, task))
        assert evaluate(method, task.test).accuracy > 0.5
    assert len({method.norms.of(task)["tau"].item() for task in (1, 2)} | {net.trunk.tau.item()}) == 3
    assert all(torch.equal(logits(method, task), then) for task, then in zip(tasks, answers, strict=True))


def test_a_plain_trunk_has_no_divisors():
    trunk = nn.Sequential(nn.Flatten(), nn.Linear(16, 24), nn.LayerNorm(24), nn.PReLU(), nn.Linear(24, 8))
    assert divisors(Network(trunk, tasks=toy_tasks(1))) == []


def test_matrices_that_may_not_be_zero():
    """One is inverted, which ends in an error; the rows of another are divided by their lengths."""

    class Inverse(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(torch.eye(16)) for _ in range(3))

        def forward(self, x):
            return x.flatten(1) @ torch.linalg.inv(self.a) @ (self.b / self.b.norm(dim=1, keepdim=True)) @ self.c

    net = Network(Inverse(), tasks=toy_tasks(1))
    assert divisors(net, ["a", "b", "c"]) == ["a", "b"]
    assert divisors(net) == []


class Fourier(nn.Module):
    """A trunk with complex weights in the frequency domain: a vector and a matrix."""

    def __init__(self):
        super().__init__()
        self.a, self.o = nn.Linear(16, 24), nn.Linear(24, 24)
        self.w = nn.Parameter(torch.randn(13, dtype=torch.cfloat))
        self.m = nn.Parameter(torch.randn(13, 13, dtype=torch.cfloat) / 4)

    def forward(self, x):
        return torch.relu(self.o(torch.fft.irfft((torch.fft.rfft(self.a(x.flatten(1))) * self.w) @ self.m, n=24)))


@pytest.mark.parametrize(
    "options",
    quick_and_slow(
        [("hat", {}), ("pmask", {}), ("packnet", {}), ("packnet", {"biases": "task"})], [("hat", {}), ("packnet", {})]
    ),
)
def test_complex_weights_are_learned_and_kept(options, tmp_path):
    name, given = options
    tasks = toy_tasks(3)
    torch.manual_seed(0)
    method = METHODS[name](Network(Fourier(), tasks=tasks), **given)
    start, answers = method.net.trunk.w.detach().clone(), []
    for task in tasks:
        learn(method, [task], Trainer(MOMENTUM))
        answers.append(logits(method, task))
        assert evaluate(method, task.test).accuracy > 0.5
    assert not torch.equal(method.net.trunk.w, start)
    assert all(torch.equal(logits(method, task), then) for task, then in zip(tasks, answers, strict=True))
    hr.save(method, tmp_path / "model.safetensors")
    again = hr.load(tmp_path / "model.safetensors", Fourier())
    assert all(torch.equal(logits(again, task), then) for task, then in zip(tasks, answers, strict=True))


def test_gradients_of_complex_gates_are_those_of_autograd():
    torch.manual_seed(0)
    w, e = torch.randn(6, dtype=torch.cdouble, requires_grad=True), torch.randn(6, dtype=torch.double, requires_grad=True)
    weights = torch.randn(6, dtype=torch.cdouble)
    method = METHODS["pmask"](Network(nn.Sequential(nn.Flatten(), nn.Linear(16, 4)), tasks=toy_tasks(1)))
    method.net.trunk.w, method.names, method.price = (
        nn.Parameter(w.detach()),
        ["trunk.w"],
        torch.zeros(6, dtype=torch.double),
    )
    method.embeddings, method.smax = nn.Parameter(e.detach().clone()), 1.0
    masked, _ = method.masked(torch.tensor(1.0, dtype=torch.double))
    (masked[0] * weights).abs().square().sum().backward()
    (torch.sigmoid(e) * w * weights).abs().square().sum().backward()
    assert torch.allclose(method.net.trunk.w.grad, w.grad)
    assert torch.allclose(method.embeddings.grad, e.grad)


def test_frozen_complex_entries_keep_their_bits():
    weight = nn.Parameter(torch.randn(3, 2, dtype=torch.cfloat))
    mask, before = torch.tensor([[True, False], [False, True], [True, True]]), weight.detach().clone()
    freeze = Freeze(weight, mask)
    weight.grad = torch.ones_like(weight)
    freeze.mask_grad()
    assert torch.equal(weight.grad, torch.where(mask, 0, torch.ones_like(weight)))
    with torch.no_grad():
        weight.add_(1 + 2j)[0, 1] = complex("inf")
    freeze.restore()
    assert torch.equal(weight[mask], before[mask])
    assert weight.isfinite().all()
    assert torch.equal(weight[1, 0], before[1, 0] + (1 + 2j))


def test_sparse_weights_are_refused_by_name():
    trunk = nn.Sequential(nn.Flatten(), nn.Linear(16, 4))
    trunk[1].weight = nn.Parameter(trunk[1].weight.detach().to_sparse())
    with pytest.raises(ValueError, match=r"'1.weight' is sparse"):
        Network(trunk, tasks=toy_tasks(1))


class Neighbours(nn.Module):
    """Mixes the pixels of an image by a sparse matrix, which is a buffer of no file, or a plain attribute."""

    def __init__(self, *, buffer):
        super().__init__()
        self.layer, matrix = nn.Linear(16, 8), torch.eye(16).to_sparse()
        if buffer:
            self.register_buffer("matrix", matrix, persistent=False)
        else:
            self.matrix = matrix

    def forward(self, x):
        return self.layer(torch.sparse.mm(self.matrix, x.flatten(1).T).T)


@pytest.mark.parametrize(
    ("buffer", "named"), [(True, r"matrix' is sparse"), (False, r"sparse tensor \(test_promise_weights.py, line")]
)
def test_a_sparse_matrix_is_refused_in_one_line(buffer, named):
    with pytest.raises(ValueError, match=named):
        hr.HAT(Network(Neighbours(buffer=buffer), tasks=toy_tasks(1)))
    with pytest.raises(ValueError, match=named):
        Network.from_classifier(nn.Sequential(Neighbours(buffer=buffer), nn.Linear(8, 3)), tasks=toy_tasks(1))


def words(layer):
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(32, 8))


@pytest.mark.parametrize("name", ["hat", "pmask", "sgd"])
def test_sparse_gradients_are_refused_in_one_line(name):
    x, y = torch.randint(9, (20, 4)), torch.arange(20) % 2
    task = hr.Task.from_arrays(0, "words", x, y, x, y, tokens=True)
    with pytest.raises(ValueError, match=r"'0' has sparse gradients.*Embedding\(sparse=False\)"):
        METHODS[name](Network(words(nn.Embedding(9, 8, sparse=True)), tasks=[task]))
    net = Network(words(nn.Embedding(9, 8, sparse=True)), tasks=[task], freeze="0")  # it has no gradient
    METHODS[name](net).learn(task, Trainer(Regime(epochs=1)))
