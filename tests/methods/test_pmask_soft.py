"""PMASK with soft masks: gates that stay sigmoid(smax e), by formulas in float64, and what they forget."""

import pytest
import torch

from hatrack import HAT, PMASK, Network, Regime, Trainer
from hatrack.methods.parts.partial_freeze import PartialFreeze
from hatrack.networks.mlp import mlp
from hatrack.networks.resnet import resnet18
from hatrack.seeds import seeded
from hatrack.tasks.split import Batch
from tests.helpers.learning import FunctionFit, logits
from tests.helpers.toys import toy_tasks

pytestmark = pytest.mark.filterwarnings("ignore:task .* finds under 5% free")  # the networks are tiny
SMAX = 3.0  # so that many gates are neither open nor closed


def make(tasks, trunk=None, **options):
    with seeded(0, "weights"):
        trunk = trunk or mlp(tasks[0].shape, widths=(9, 8), dropout=0.0, input_dropout=0.0)
    return PMASK(Network(trunk, tasks=tasks), **{"masks": "soft", "smax": SMAX, **options})


def learn(method, tasks, **regime):
    fit = Trainer(Regime(**{"epochs": 3, "batch": 16, "lr": 0.1, **regime}))
    for task in tasks:
        method.learn(task, fit)


def sigmoid(x: float) -> float:
    return torch.sigmoid(torch.tensor(x, dtype=torch.float64)).item()


def kept_embeddings(method, tasks):
    """Learn the tasks, and return the embeddings with which each of them ended, in double precision."""
    found = []

    def fit(method, task, **how):
        Trainer(Regime(epochs=2, batch=16, lr=0.1))(method, task, **how)
        found.append(method.embeddings.detach().double().clone())

    for task in tasks:
        method.learn(task, FunctionFit(fit))
    return found


def test_the_gates_of_finished_tasks_by_a_plain_loop():
    """a = sigmoid(smax e) for every weight; what later tasks find used is the largest of all finished ones."""
    tasks = toy_tasks(3)
    method = make(tasks)
    ends = kept_embeddings(method, tasks[:2])
    gates = [[sigmoid(SMAX * e) for e in end.tolist()] for end in ends]
    for task, expected in enumerate(gates):
        assert method.final_gates(task).tolist() == pytest.approx(expected, abs=1e-6)
    most = [max(pair) for pair in zip(*gates, strict=True)]
    assert method.used().tolist() == pytest.approx(most, abs=1e-6)
    assert sum(0.1 < a < 0.9 for a in most) > 50
    names = [f"{layer}.{kind}" for layer in (1, 3) for kind in ("weight", "bias")]
    assert list(method.weight_masks(0)) == names
    masks = torch.cat([mask.flatten() for mask in method.weight_masks(0).values()])
    assert masks.tolist() == [a > 0.5 for a in gates[0]]
    assert method.usage()["1.weight"] == pytest.approx(sum(a > 0.5 for a in most[: 16 * 9]) / (16 * 9))


def test_the_answers_are_those_of_weights_times_gates():
    tasks = toy_tasks(2)
    method = make(tasks)
    (end, _) = kept_embeddings(method, tasks)
    h, first = tasks[0].test.inputs(torch.arange(30)).double().flatten(1), 0
    for layer in (1, 3):
        tensors = []
        for name in ("weight", "bias"):
            w = method.net.trunk[layer].get_parameter(name).detach().double()
            a = torch.sigmoid(SMAX * end[first : first + w.numel()])
            tensors.append(w * a.view(w.shape))
            first += w.numel()
        h = (h @ tensors[0].T + tensors[1]).clamp(min=0)
    head = method.net.heads[0]
    expected = h @ head.weight.detach().double().T + head.bias.detach().double()
    with torch.no_grad():
        found = method.eval()(tasks[0].test.inputs(torch.arange(30)), 0)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
        served = method.served(0)(tasks[0].test.inputs(torch.arange(30)))
        extracted = method.extract(0)(tasks[0].test.inputs(torch.arange(30)))
    assert torch.equal(served, found)
    torch.testing.assert_close(extracted, found, rtol=1e-5, atol=1e-5)


def test_the_capacity_term_and_the_updates_by_a_plain_loop():
    """R = sum a (1 - a^<t) / sum (1 - a^<t), and an update of any length is made 1 - a^<t times as long."""
    tasks = toy_tasks(2)
    method = make(tasks, c=2.0)
    kept_embeddings(method, tasks[:1])
    used = [float(a) for a in method.used().double()]
    seen = []

    def fit(method, task, **how):
        place = torch.full((), 2), torch.full((), 5)
        given: Batch = task.train.take(torch.arange(16), *place, 16)
        s = 1 / SMAX + (SMAX - 1 / SMAX) * 2 / 4
        a = [sigmoid(s * e) for e in method.embeddings.detach().double().tolist()]
        capacity = sum(x * (1 - u) for x, u in zip(a, used, strict=True)) / sum(1 - u for u in used)
        weights, found = method.masked(torch.tensor(s))
        assert found.item() == pytest.approx(capacity, rel=1e-5)
        expected = given.loss(method.run(given.x, 1, weights)).item() + 2.0 * capacity
        assert method.loss(given).item() == pytest.approx(expected, rel=1e-5)
        now = sum(x * (1 - u) for x, u in zip(method.final_gates(1).tolist(), used, strict=True)) / sum(1 - u for u in used)
        method.validation = "total"
        assert method.validation_price(1) == pytest.approx(2.0 * now, rel=1e-5)
        method.validation = "loss"
        before = torch.cat([w.detach().double().flatten() for w in method.weights()])
        method.edit_grads(given, None)
        with torch.no_grad():
            for weight in method.weights():
                weight.add_(1)
            method.constrain()
        after = torch.cat([w.detach().double().flatten() for w in method.weights()])
        seen.extend((after - before).tolist())

    method.learn(tasks[1], FunctionFit(fit))
    assert seen == pytest.approx([1 - u for u in used], abs=1e-6)


def test_soft_masks_forget_a_little_and_binary_ones_nothing():
    """The control has the default, with the same weights, seed and hardness."""
    tasks = toy_tasks(3)
    changes = {}
    for masks in ("binary", "soft"):
        method = make(tasks, masks=masks, smax=25.0)
        learn(method, tasks[:1], epochs=5, batch=8)
        first = logits(method, tasks[0])
        learn(method, tasks[1:])
        changes[masks] = (first - logits(method, tasks[0])).abs().max().item()
        assert bool(method.used_by(0)) == (masks == "binary")
    assert changes["binary"] == 0 < changes["soft"]


def test_the_default_is_binary():
    method = make(toy_tasks(2), masks="binary")
    assert PMASK(Network(mlp((1, 4, 4)), [2], torch.zeros(2, 1, 4, 4))).options["masks"] == "binary"
    assert method.packed_masks.shape == (2, -(-method.count // 8))
    assert make(toy_tasks(2)).packed_masks.shape == (2, method.count)


def test_an_infinite_weight_is_made_finite():
    """No soft gate is 0, so that an infinity would pass it."""
    tasks = toy_tasks(2)
    method = make(tasks)
    learn(method, tasks[:1])

    def fit(method, task, **how):
        for partial in method.freezes:
            partial.mask_grad()
        with torch.no_grad():
            method.net.trunk[1].weight[0, 0] = torch.inf
            method.constrain()
        assert method.net.trunk[1].weight.isfinite().all()

    method.learn(tasks[1], FunctionFit(fit))


def test_a_residual_network_with_norms_and_a_released_task():
    tasks = toy_tasks(2, shape=(1, 8, 8))
    method = make(tasks, resnet18((1, 8, 8), width=2), smax=50.0)
    learn(method, tasks, epochs=1)
    assert all(logits(method, task).isfinite().all() for task in tasks)
    method.release(0)
    fresh = make(tasks, resnet18((1, 8, 8), width=2), smax=50.0)
    assert torch.equal(method.final_gates(0), fresh.final_gates(0))
    assert torch.equal(method.used(), method.final_gates(1))


@pytest.mark.parametrize("kind", [HAT, PMASK])
def test_shares_move_with_their_parameters(kind):
    """A loop may move a method to another device while a task is learned."""
    tasks = toy_tasks(2)
    method = kind(make(tasks).net, masks="soft")
    learn(method, tasks[:1], epochs=1)
    method.begin_task(1)
    assert all(isinstance(partial, PartialFreeze) for partial in method.freezes)
    method.to("meta")
    for partial in method.freezes:
        tensors = [partial.share, partial.before, partial.freeze.free, partial.freeze.frozen_bits]
        assert {t.device.type for t in tensors} == {"meta"}
