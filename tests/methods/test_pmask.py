"""PMASK: its formulas worked out another way, bits, and weights that stay as they are."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hatrack import HAT, Diverged, Network, Regime, Trainer, evaluate
from hatrack.methods.parts.bits import pack, unpack
from hatrack.methods.parts.masked_weights import Masked
from hatrack.methods.pmask import LIMIT, PMASK
from hatrack.networks.alexnet import alexnet
from hatrack.networks.mlp import mlp
from hatrack.networks.resnet import resnet18
from hatrack.seeds import seeded
from hatrack.tasks.split import Batch
from tests.helpers.learning import FunctionFit
from tests.helpers.tiers import every_value
from tests.helpers.toys import toy_tasks

pytestmark = pytest.mark.filterwarnings("ignore:task .* finds under 5% free")  # the networks are tiny


def make(tasks, trunk=None, *, heads="multi", freeze="", **options):
    if trunk is None:
        with seeded(0, "weights"):
            trunk = mlp(tasks[0].shape, widths=(24, 24), dropout=0.0, input_dropout=0.0)
    example = tasks[0].train.inputs(torch.arange(2))
    return PMASK(Network(trunk, [t.classes for t in tasks], example, heads=heads, freeze=freeze), **options)


def learn(method, tasks, **regime):
    fit = Trainer(Regime(**{"epochs": 3, "batch": 16, "lr": 0.1, **regime}))
    for task in tasks:
        method.learn(task, fit)
    return fit


@torch.no_grad()
def logits(method, task, which=None):
    return method.eval()(task.test.inputs(torch.arange(len(task.test))), task.index if which is None else which)


def batch(task, step=2, steps=5, size=16) -> Batch:
    number = torch.full((), step)
    return task.train.take(torch.arange(size), number, torch.full((), steps), size)


def within(method, task, do):
    """Call `do` with the arguments of the fit, within `learn`, and return its result."""
    found = []

    def fit(method, task, **how):
        found.append(do(how))

    method.learn(task, FunctionFit(fit))
    return found[0]


# Formulas


def wide(e: Tensor, s: float, smax: float, price: Tensor, w: Tensor, g: Tensor, k: float) -> tuple[Tensor, Tensor, Tensor]:
    """In double precision by autograd: the two gradients, that of e times HAT's factor, and the capacity term."""
    e, w = (t.double().requires_grad_() for t in (e, w))
    a = torch.sigmoid(s * e)
    capacity = (a * price.double()).sum()
    ((w * a * g.double()).sum() + k * capacity).backward()
    factor = smax / s * (torch.cosh(s * e.detach()) + 1) / (torch.cosh(e.detach()) + 1)
    return e.grad * factor, w.grad, capacity.detach()


@pytest.mark.parametrize("s", [1 / 400, 0.1, 1.0, 3.0])
def test_gradients_are_those_of_autograd_times_the_compensation(s):
    draw = torch.Generator().manual_seed(0)
    e, w, g = (torch.randn(1000, generator=draw) for _ in range(3))
    price = torch.rand(1000, generator=draw) / 1000
    e.clamp_(-5, 5)
    e.requires_grad_(), w.requires_grad_()
    masked, capacity = Masked.apply(e, torch.tensor(s), 400.0, price, w)
    ((masked * g).sum() + 0.75 * capacity).backward()
    of_e, of_w, share = wide(e.detach(), s, 400.0, price, w.detach(), g, 0.75)
    torch.testing.assert_close(e.grad.double(), of_e, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(w.grad.double(), of_w, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(capacity.detach().double(), share, rtol=1e-5, atol=0)


def test_one_weight_by_hand():
    """a = sigmoid(2 * 0.5) = 0.7310586; the slope is 400 sigmoid(0.5) (1 - sigmoid(0.5)) = 94.0015."""
    e, w = torch.tensor([0.5], requires_grad=True), torch.tensor([-3.0], requires_grad=True)
    masked, capacity = Masked.apply(e, torch.tensor(2.0), 400.0, torch.tensor([0.25]), w)
    (2 * masked.sum() + capacity).backward()
    assert masked.item() == pytest.approx(-3 * 0.7310586)
    assert capacity.item() == pytest.approx(0.25 * 0.7310586)
    assert w.grad.item() == pytest.approx(2 * 0.7310586)
    assert e.grad.item() == pytest.approx(94.0015 * (2 * -3 + 0.25), rel=1e-5)


@pytest.mark.parametrize(
    ("se", "live"), [(-60, False), (-50.5, False), (-49, True), (-30, True), (10, True), (17.4, False), (60, False)]
)
def test_gates_that_are_fully_open_or_closed_get_no_gradient(se, live):
    e = torch.tensor([se / 100], requires_grad=True)
    masked, _ = Masked.apply(e, torch.tensor(100.0), 400.0, torch.zeros(1), torch.ones(1))
    masked.sum().backward()
    slope = 400 / (2 * (math.cosh(se / 100) + 1))
    assert e.grad.item() == pytest.approx(slope if live else 0.0, rel=1e-4)
    assert masked.item() == pytest.approx(1 / (1 + math.exp(-max(se, -50))), rel=1e-4)


def test_nothing_is_denormal():
    """Such numbers make a CPU many times slower."""
    e = torch.linspace(-LIMIT, LIMIT, 10001)
    for s in (1.0, 20.0, 100.0, 400.0):
        (masked, _) = Masked.apply(e, torch.tensor(s), 400.0, torch.zeros_like(e), torch.full_like(e, 1e-3))
        assert masked.abs().min() > torch.finfo(torch.float32).tiny


def test_a_network_in_bfloat16_has_embeddings_in_float32():
    e, w = torch.randn(6, requires_grad=True), torch.randn(2, 3).bfloat16().requires_grad_()
    masked, capacity = Masked.apply(e, torch.tensor(1.0), 400.0, torch.full((6,), 1 / 6), w)
    assert (masked.dtype, capacity.dtype) == (torch.bfloat16, torch.float32)
    (masked.float().sum() + capacity).backward()
    assert (w.grad.dtype, e.grad.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("options", [{}, {"c": 2.0, "smax": 50.0, "anneal": "authors"}])
def test_the_loss_is_that_of_the_formulas(options):
    """While the second task is learned, in double precision, with the network written out."""
    tasks = toy_tasks(2)
    method = make(tasks, **options)
    learn(method, tasks[:1])
    used = method.used()
    assert 0.2 < used.float().mean() < 0.8

    def look(how):
        given = batch(tasks[1], step=1, steps=5)
        smax, c = method.smax, method.c
        share = 1 * 16 / len(tasks[1].train) if "anneal" in options else 1 / 4
        s = 1 / smax + (smax - 1 / smax) * share
        a = torch.sigmoid(s * method.embeddings.detach().double())
        first = 0
        tensors = {}
        for name, w in zip(method.names, method.weights(), strict=True):
            tensors[name] = w.double() * a[first : first + w.numel()].view(w.shape)
            first += w.numel()
        h = given.x.double().flatten(1)
        for layer in (1, 3):
            h = (h @ tensors[f"trunk.{layer}.weight"].T + tensors[f"trunk.{layer}.bias"]).clamp(min=0)
        out = h @ method.net.heads[1].weight.double().T + method.net.heads[1].bias.double()
        capacity = a[~used].sum() / (~used).sum()
        expected = -out.log_softmax(1)[torch.arange(16), given.y].mean() + c * capacity
        torch.testing.assert_close(method.loss(given).double(), expected, rtol=1e-5, atol=1e-6)
        return True

    assert within(method, tasks[1], look)


def test_embeddings_stay_in_the_active_range():
    tasks = toy_tasks(1)
    method = make(tasks, gate_lr=10.0)

    def look(how):
        step = Trainer(Regime()).start(method, tasks[0], **how).step
        for _ in range(5):
            step(torch.arange(16), torch.full((), 0))
        return method.embeddings.abs().max().item()

    assert within(method, tasks[0], look) == LIMIT


def test_the_step_of_the_embeddings_is_scaled_by_the_weights_per_unit():
    """By the capacity term alone an embedding moves as far as one of HAT on the same network."""
    tasks = toy_tasks(1)
    method = make(tasks)
    hat = HAT(copy.deepcopy(method.net))
    assert method.count == 16 * 24 + 24 + 24 * 24 + 24
    assert hat.units.count == 48
    assert method.per_unit == method.count / 48

    def rates(how):
        return list(how["plain"].values())

    (rate,) = within(method, tasks[0], rates)
    assert rate == pytest.approx(0.05 * method.count / 48)
    price = 1 / method.count  # the gradient of R by one gate
    assert rate * price == pytest.approx(0.05 * 1 / hat.units.count)


def test_weights_per_unit_of_alexnet():
    method = PMASK(Network(alexnet((3, 32, 32)), [2], torch.zeros(2, 3, 32, 32)))
    assert method.count == 6_503_872
    assert method.per_unit == 6_503_872 / 4_544


def test_a_larger_c_uses_fewer_weights_task_after_task():
    tasks, shares, regime = toy_tasks(3), [], {"epochs": 15, "batch": 8, "lr": 0.05, "schedule": "constant"}
    for c in (0.1, 0.75, 2.5):
        method, used = make(tasks, c=c), []
        for task in tasks:
            learn(method, [task], **regime, restore=False)
            used.append(method.used().float().mean().item())
        assert used == sorted(used)
        shares.append(used)
    for few, some, many in zip(*reversed(shares), strict=True):
        assert few + 0.1 < some < many - 0.1


def test_no_free_weight_costs_nothing():
    """All are used: the capacity term is 0 and the task still learns what it may, its head."""
    tasks = toy_tasks(2)
    method = make(tasks)
    method.packed_masks[0], method.done[0] = 255, True
    weights = [w.detach().clone() for w in method.weights()]
    assert set(method.usage().values()) == {1.0}
    learn(method, tasks[1:], epochs=20)
    assert all(torch.equal(a, b) for a, b in zip(weights, method.weights(), strict=True))
    assert evaluate(method, tasks[1].test).accuracy > 0.5


# Bits


@pytest.mark.parametrize("count", [1, 7, 8, 9, 1000, 1003])
def test_bits(count):
    bits = torch.rand(count, generator=torch.Generator().manual_seed(count)) < 0.5
    packed = pack(bits)
    assert (packed.dtype, len(packed)) == (torch.uint8, math.ceil(count / 8))
    assert torch.equal(unpack(packed, count), bits)
    assert packed.tolist()[0] == sum(1 << k for k in range(min(8, count)) if bits[k])


def bytes_of(module):
    return sum(t.numel() * t.element_size() for t in module.state_dict().values())


@pytest.mark.slow
def test_ten_tasks_on_alexnet_take_a_bit_per_weight_and_task():
    net = Network(alexnet((3, 32, 32)), [2] * 10, torch.zeros(2, 3, 32, 32))
    method = PMASK(net)
    for task in range(10):
        method.packed_masks[task], method.done[task] = pack(method._initial_embeddings(task) > 0), True
    extra = 8 * (bytes_of(method) - bytes_of(net))
    assert extra <= 1.1 * 10 * method.count
    assert extra >= 10 * method.count
    assert torch.equal(method.final_gates(7), method._initial_embeddings(7) > 0)


def test_embeddings_exist_only_while_a_task_is_learned():
    tasks = toy_tasks(2)
    method = make(tasks)
    keys = method.state_dict().keys()
    assert "embeddings" not in keys

    def look(how):
        assert list(how["plain"]) == [method.embeddings]
        assert torch.equal(method.final_gates(0), method.embeddings > 0)
        return method.state_dict()["embeddings"].clone()

    first = within(method, tasks[0], look)
    assert method.state_dict().keys() == keys
    assert method.embeddings is None
    assert torch.equal(first, within(method, tasks[0], look)), "they start again from the same values"
    with pytest.raises(Diverged):
        learn(method, tasks[1:], lr=3e38, clip=0.0)
    assert method.state_dict().keys() == keys
    assert method.done.tolist() == [True, False]


def test_a_fit_continues_from_the_state_of_another_one():
    tasks = toy_tasks(2)
    method, twin = make(tasks), make(tasks)
    learn(method, tasks[:1])
    twin.load_state_dict(copy.deepcopy(method.state_dict()))  # as it was when the task began

    def steps(one, how):
        step = Trainer(Regime(lr=0.1)).start(one, tasks[1], **how).step
        for number in range(2):
            step(torch.arange(16), torch.full((), number))

    def half(how):
        steps(method, how)
        state = copy.deepcopy(method.state_dict())
        steps(method, how)
        return state

    def other_half(how):
        twin.load_state_dict(state)
        steps(twin, how)

    state = within(method, tasks[1], half)
    assert "embeddings" in state
    within(twin, tasks[1], other_half)
    assert all(torch.equal(value, twin.state_dict()[key]) for key, value in method.state_dict().items())


def test_a_task_starts_with_gates_of_its_own():
    tasks = toy_tasks(2)
    method = make(tasks)
    assert torch.equal(method.final_gates(0), method._initial_embeddings(0) > 0)
    assert 0.4 < method.final_gates(0).float().mean() < 0.6
    assert not torch.equal(method.final_gates(0), method.final_gates(1))
    assert not method.used().any(), "and freezes nothing"
    assert make(tasks, embedding="uniform").final_gates(1).all()


def test_the_best_epoch_is_kept_with_its_gates():
    """What is validated is what is kept: the binary gates."""
    tasks = toy_tasks(1)
    method = make(tasks)
    (fitted,) = learn(method, tasks, epochs=6).fits
    assert evaluate(method, tasks[0].valid).loss == pytest.approx(fitted.epochs[fitted.best].valid_loss)


# Frozen weights


@pytest.mark.parametrize("heads", ["multi", "shared"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_used_weights_keep_their_bits(heads, optimizer):
    tasks = toy_tasks(3)
    method = make(tasks, heads=heads)
    fit = Trainer(Regime(epochs=3, batch=16, optimizer=optimizer, lr=0.01, weight_decay=0.1, keep_state=True))
    kept = []
    for task in tasks:
        before, used = torch.cat([w.detach().flatten() for w in method.weights()]), method.used()
        method.learn(task, fit)
        after = torch.cat([w.detach().flatten() for w in method.weights()])
        assert torch.equal(before[used], after[used])
        assert (before[~used] != after[~used]).float().mean() > 0.9
        kept.append(logits(method, task))
        for earlier, old in zip(tasks, kept, strict=False):
            assert torch.equal(logits(method, earlier), old)
    assert all(old.std(0).min() > 0 for old in kept)
    assert ("heads.0.weight" in method.usage()) == (heads == "shared")


def test_free_weights_have_no_gradient_from_a_finished_task_and_used_ones_matter():
    tasks = toy_tasks(2)
    method = make(tasks)
    learn(method, tasks[:1])
    x = tasks[0].test.inputs(torch.arange(30))
    grads = torch.autograd.grad(method.eval()(x, 0).square().sum(), method.weights())
    used = method.used()
    grad = torch.cat([g.flatten() for g in grads])
    assert (grad[~used] == 0).all()
    assert (grad[used] != 0).float().mean() > 0.3
    before = logits(method, tasks[0])
    with torch.no_grad():
        for w, part in zip(method.weights(), used.split([w.numel() for w in method.weights()]), strict=True):
            w.add_(part.view_as(w).float())
    assert not torch.equal(before, logits(method, tasks[0]))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_not_even_an_infinity_passes_a_closed_gate(value):
    tasks = toy_tasks(1)
    method = make(tasks)
    learn(method, tasks)
    before = logits(method, tasks[0])
    with torch.no_grad():
        for w, part in zip(method.weights(), method.used().split([w.numel() for w in method.weights()]), strict=True):
            w.masked_fill_(~part.view_as(w), value)
    assert torch.equal(before, logits(method, tasks[0]))


class Twice(nn.Module):
    """One layer used twice, and a recurrent one."""

    def __init__(self):
        super().__init__()
        self.layer, self.cell = nn.Linear(16, 16), nn.GRU(4, 6, batch_first=True)

    def forward(self, x):
        x = self.layer(F.relu(self.layer(x.flatten(1))))
        return self.cell(x.view(-1, 4, 4))[0].flatten(1)


def residual(**options):
    return resnet18((1, 8, 8), width=2, **options)


@pytest.mark.parametrize(
    ("optimizer", "build"), every_value(["momentum", "adamw"], [Twice, residual, lambda: residual(block="authors")])
)
def test_any_network(build, optimizer):
    tasks = toy_tasks(3, shape=(1, 4, 4) if build is Twice else (1, 8, 8))
    with seeded(0, "weights"):
        method = make(tasks, build())
    fit = Trainer(Regime(epochs=2, batch=16, optimizer=optimizer, lr=0.01, weight_decay=0.1, keep_state=True))
    fit.watch = build is not Twice  # torch exchanges the weights of a recurrent cell in a list, and back
    kept = []
    for task in tasks:
        method.learn(task, fit)
        kept.append(logits(method, task))
        for earlier, old in zip(tasks, kept, strict=False):
            assert torch.equal(logits(method, earlier), old)
    assert all(old.std(0).min() > 0 for old in kept)


@pytest.mark.slow
def test_a_residual_network_learns():
    tasks = toy_tasks(2, shape=(1, 8, 8), train=120)
    with seeded(0, "weights"):
        method = make(tasks, resnet18((1, 8, 8), width=4))
    learn(method, tasks, epochs=5, batch=8, lr=0.1)
    assert min(evaluate(method, task.test).accuracy for task in tasks) > 0.8


# Norms


def test_norms_have_no_gates_and_are_per_task():
    tasks = toy_tasks(2, shape=(1, 8, 8))
    method = make(tasks, residual())
    assert all(method.net.get_parameter(name).dim() == 4 for name in method.names)
    assert len(method.names) == 20
    before = copy.deepcopy(method.net.trunk[0][1].state_dict())
    learn(method, tasks[1:], epochs=1)
    assert all(torch.equal(before[key], value) for key, value in method.net.trunk[0][1].state_dict().items())


def test_shared_norms_drift():
    """The control: with norms that all tasks train, an earlier task changes though every weight it uses is frozen."""
    tasks = toy_tasks(2, shape=(1, 8, 8))
    method = make(tasks, residual(), norms="shared")
    assert all(method.net.get_parameter(name).dim() == 4 for name in method.names)
    learn(method, tasks[:1])
    before = logits(method, tasks[0])
    learn(method, tasks[1:])
    assert not torch.equal(before, logits(method, tasks[0]))


def test_statistics_are_those_of_the_binary_gates():
    tasks = toy_tasks(1, shape=(1, 8, 8))
    method = make(tasks, nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten()))
    learn(method, tasks)
    weights = [torch.where(g.view_as(w), w, 0).double() for g, w in zip(
        method.final_gates(0).split([w.numel() for w in method.weights()]), method.weights(), strict=True)]  # fmt: skip
    assert method.names == ["trunk.0.weight", "trunk.0.bias"]
    x = tasks[0].train.inputs(torch.arange(len(tasks[0].train))).double()
    h = F.conv2d(x, *weights).transpose(0, 1).flatten(1)
    norm = method.net.trunk[1]
    torch.testing.assert_close(norm.running_mean.double(), h.mean(1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norm.running_var.double(), h.var(1), rtol=1e-4, atol=1e-5)


# What users freeze


def test_parts_that_the_user_froze_have_no_gates():
    tasks = toy_tasks(2)
    method = make(tasks, freeze="1")
    assert method.names == ["trunk.3.weight", "trunk.3.bias"]
    before = method.net.trunk[1].weight.clone()
    learn(method, tasks)
    assert torch.equal(before, method.net.trunk[1].weight)
    with pytest.raises(ValueError, match="no weights to mask"):
        make(tasks, freeze="1,3")


# Taking back


def test_usage():
    method = make(toy_tasks(3))
    bits = torch.zeros(3, method.count, dtype=torch.bool)
    bits[0, : 16 * 24 // 2] = True  # half of the first layer
    bits[1, 16 * 24 // 2 : 16 * 24 + 6] = True  # the other half, and a quarter of its bias
    bits[2] = True  # not learned
    for task in range(3):
        method.packed_masks[task], method.done[task] = pack(bits[task]), task < 2
    assert method.usage() == {"1.weight": 1.0, "3.weight": 0.0}


@pytest.mark.parametrize(("released", "heads"), every_value([0, 1], ["multi", "shared"]))
def test_release(heads, released):
    tasks = toy_tasks(3, shape=(1, 8, 8))
    with seeded(0, "weights"):
        method = make(tasks, residual(), heads=heads)
    learn(method, tasks)
    others = [task for task in tasks if task.index != released]
    before, taken = [logits(method, task) for task in others], method.used()
    only = method.final_gates(released) & ~torch.stack([method.final_gates(task.index) for task in others]).any(0)
    method.release(released)
    assert torch.equal(method.used(), taken & ~only)
    assert only.any()
    for task, old in zip(others, before, strict=True):
        assert torch.equal(logits(method, task), old)
    net = copy.deepcopy(method.net)
    twin = make(tasks, net.trunk, heads=heads)  # a task of that number that was never learned, with these weights
    if heads == "shared":
        twin.net.heads.load_state_dict(net.heads.state_dict())
    twin.norms.load_state_dict(method.norms.state_dict())
    assert torch.equal(logits(method, tasks[released]), logits(twin, tasks[released]))
    learn(method, [tasks[released]])
    for task, old in zip(others, before, strict=True):
        assert torch.equal(logits(method, task), old)


def test_a_task_that_is_not_there():
    tasks = toy_tasks(2)
    method = make(tasks)
    for task in (2, -1):
        with pytest.raises(IndexError, match=f"no task {task}"):
            method.release(task)
        with pytest.raises(IndexError, match=f"no task {task}"):
            logits(method, tasks[0], task)


def test_a_task_that_is_learned_again_frees_its_weights():
    tasks = toy_tasks(2)
    method = make(tasks, c=2.5)
    learn(method, tasks)
    old, other = method.final_gates(0), method.final_gates(1)
    learn(method, [toy_tasks(2, seed=5)[0]], epochs=8, batch=4)
    new = method.final_gates(0)
    assert torch.equal(method.final_gates(1), other)
    assert torch.equal(method.used(), new | other)
    assert (old & ~new & ~other).any(), "some weights became free"
