"""HAT against its formulas, and its guarantee against attempts to break it."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from hatrack import HAT, Network, Regime, Trainer
from hatrack.benchmarks import BENCHMARKS
from hatrack.methods.parts.annealing import AnnealedGates, compensation, hardness, without_denormals
from hatrack.networks.alexnet import alexnet
from hatrack.networks.mlp import mlp
from hatrack.seeds import seeded
from hatrack.tasks.split import Batch
from hatrack.tracing.units import Units
from tests.helpers.learning import learn, logits
from tests.helpers.tiers import quick_and_slow
from tests.helpers.toys import toy_tasks


def make_hat(tasks, *, widths=(12, 10), known=None, heads="multi", **options) -> HAT:
    with seeded(0, "weights"):
        trunk = mlp(tasks[0].shape, widths=widths, dropout=0.0, input_dropout=0.0)
    net = Network(trunk, [t.classes for t in tasks[:known]], tasks[0].train.inputs(torch.arange(2)), heads=heads)
    return HAT(net, **options)


def place(step: int, steps: int, seen: float = 0.0) -> Batch:
    nothing = torch.zeros(0)
    return Batch(nothing, nothing, 0, torch.tensor(step), torch.tensor(steps), torch.tensor(seen))


# Formulas


@pytest.mark.parametrize("smax", [25, 400, 800])
def test_annealing_follows_the_paper(smax):
    for b in range(1, 11):  # the paper counts from 1
        expected = 1 / smax + (smax - 1 / smax) * (b - 1) / (10 - 1)
        assert hardness(place(b - 1, 10), smax, "paper").item() == pytest.approx(expected, rel=1e-6)
    assert hardness(place(0, 10), smax, "paper").item() == pytest.approx(1 / smax)
    assert hardness(place(9, 10), smax, "paper").item() == pytest.approx(smax)
    assert hardness(place(0, 1), smax, "paper").item() == pytest.approx(smax), "one batch: hard from the start"


@pytest.mark.parametrize(("examples", "last"), [(42500, 399.96), (60000, 399.79), (9000, 398.22)])
def test_annealing_of_the_authors_code(examples, last):
    start = (examples - 1) // 64 * 64  # where the last batch of 64 begins
    assert hardness(place(0, 1, start / examples), 400.0, "authors").item() == pytest.approx(last, abs=0.005)


def test_batches_know_how_much_of_the_epoch_is_behind_them():
    split = toy_tasks(1)[0].train  # 48 examples
    batch = split.take(torch.arange(5), torch.tensor(2), torch.tensor(3), 20)
    assert batch.seen.item() == pytest.approx(40 / 48)


def test_compensation_is_the_ratio_of_two_sigmoid_slopes():
    e = torch.linspace(-6, 6, 25, dtype=torch.float64)
    for s in (1 / 400, 0.5, 7.0):
        slope, annealed = (torch.sigmoid(x) * torch.sigmoid(-x) for x in (e, s * e))
        expected = 400 * slope / (s * annealed)
        torch.testing.assert_close(compensation(e, torch.tensor(s, dtype=torch.float64), 400.0), expected)
        single = compensation(e.float(), torch.tensor(s), 400.0)
        torch.testing.assert_close(single.double(), expected, rtol=1e-5, atol=0)


def test_compensation_is_clamped_where_the_paper_clamps_it():
    factor = compensation(torch.tensor([1.0, -1.0]), torch.tensor(400.0), 400.0)
    expected = 400 * (math.cosh(50) + 1) / (400 * (math.cosh(1) + 1))
    assert factor.tolist() == pytest.approx([expected] * 2, rel=1e-5)


def test_capacity_term_by_hand():
    hat = make_hat(toy_tasks(1), widths=(2, 2))
    hat.used = torch.tensor([1.0, 0.0, 0.25, 0.0])
    # (0.5 * 0 + 0.5 * 1 + 1 * 0.75 + 0.2 * 1) / (0 + 1 + 0.75 + 1)
    assert hat.capacity(torch.tensor([0.5, 0.5, 1.0, 0.2])).item() == pytest.approx(1.45 / 2.75)
    hat.used = torch.zeros(4)
    assert hat.capacity(torch.tensor([0.5, 0.5, 1.0, 0.2])).item() == pytest.approx(0.55), "first task: the mean gate"
    hat.used = torch.ones(4)
    assert hat.capacity(torch.ones(4)).item() == 0, "no unit is free"


def test_tiny_gates_lose_their_value_but_not_their_gradient():
    gates = torch.tensor([1e-30, 1e-13, 1e-11, 0.3, 1.0], requires_grad=True)
    out = without_denormals(gates)
    assert torch.equal(out, torch.tensor([1e-12, 1e-12, 1e-11, 0.3, 1.0]))
    (out * torch.arange(5.0)).sum().backward()
    assert gates.grad.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("slope", ["rounded", "exact"])
@pytest.mark.parametrize("some", [False, True])
def test_gates_and_their_price_by_autograd(some, slope):
    """The gradient of what is applied and of the price, in float64, times the compensation."""
    e = torch.linspace(-3, 3, 40, dtype=torch.float64).requires_grad_()
    price, weight = torch.rand(2, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    frozen, s = torch.arange(40) % 5 == 0, torch.tensor(9.0, dtype=torch.float64)
    gates, paid = AnnealedGates.apply(e, s, 400.0, price, frozen if some else None, slope)
    (found,) = torch.autograd.grad((gates * weight).sum() + 3 * paid, e)
    expected = torch.where(frozen & some, 1.0, torch.sigmoid(s * e))
    torch.testing.assert_close(gates, expected)
    torch.testing.assert_close(paid, (expected * price).sum())
    (plain,) = torch.autograd.grad((expected * (weight + 3 * price)).sum(), e)
    if slope == "exact":  # in which 1 - sigmoid(27) is not rounded either
        written_out = (weight + 3 * price) * s / (2 * (torch.cosh(s * e.detach()) + 1))
        plain = torch.where(frozen & some, 0.0, written_out)
    torch.testing.assert_close(found, plain * compensation(e.detach(), s, 400.0))
    assert bool((found[frozen] == 0).all()) == some


@pytest.mark.parametrize("slope", ["rounded", "exact"])
def test_the_slope_of_open_gates_in_float32(slope):
    """Rounded it is 0 from se = 17 on; exact it is that of float64, for open gates as for closed ones, in both places."""
    e = torch.tensor([-0.11, -0.05, 0.02, 0.05, 0.11])  # se from -44 to 44
    s, price = torch.tensor(400.0), torch.full((5,), 0.5)
    wide = torch.sigmoid(-400.0 * e.double().abs())
    slopes = 400 * wide * (1 - wide)  # no gate is near 1 here, so that nothing is rounded
    expected = slopes if slope == "exact" else torch.where(e > 17 / 400, 0.0, slopes)
    e.requires_grad_()
    gates, paid = AnnealedGates.apply(e, s, 400.0, price, None, slope)
    (found,) = torch.autograd.grad(2 * gates.sum() + 3 * paid, e)
    factor = compensation(e.detach().double(), s.double(), 400.0)
    torch.testing.assert_close(found.double(), (2 + 3 * 0.5) * expected * factor, rtol=1e-3, atol=0)
    hat = make_hat(toy_tasks(1), slope=slope)
    hat.frozen = torch.zeros(5, dtype=torch.bool)
    (found,) = torch.autograd.grad(hat.soft_gates(e, s).sum(), e)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=0)


def test_with_the_exact_slope_fewer_gates_stay_open():
    """The capacity term closes gates that are far open, which have no gradient if their slope is rounded."""
    shares = []
    for slope in ("rounded", "exact"):
        hat = make_hat(toy_tasks(1), widths=(50, 50), slope=slope, c=2.5, embedding="uniform")
        learn(hat, toy_tasks(1), Trainer(Regime(epochs=6, batch=16, lr=0.1), watch=True))  # the rule of the step
        shares.append(hat.final_gates(0).float().mean().item())
    assert shares[1] < shares[0] - 0.05


def test_gates_that_are_applied_are_no_denormals():
    gates, _ = AnnealedGates.apply(
        torch.tensor([-1.0, -0.05, 1.0]), torch.tensor(400.0), 400.0, torch.ones(3), None, "rounded"
    )
    assert gates.tolist() == pytest.approx([1e-12, torch.sigmoid(torch.tensor(-20.0)).item(), 1.0])


@pytest.mark.parametrize("s", [20.0, 60.0, 100.0, 160.0, 400.0])
def test_the_gradient_of_embeddings_is_the_paper_s_for_open_and_closed_units(s):
    """The gate behind the relu, in float64, and the compensation with |se| up to 50: closed units are pulled by the task."""
    task = toy_tasks(1, train=8, valid=0.0)[0]
    hat = make_hat([task], widths=(40, 30), c=0.0)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():  # above 8 the slope of a sigmoid in float32 is less and less exact
        hat.embeddings[0].copy_(torch.linspace(-45, 8, 70)[order] / s)
    x, y = task.train.inputs(torch.arange(8)), task.train.y
    step = round((s - 1 / 400) / (400 - 1 / 400) * 10**6)
    batch = place(step, 10**6 + 1)._replace(x=x, y=y)
    hat.loss(batch).backward()
    hat.edit_grads(batch, None)

    weights = {name: p.detach().double() for name, p in hat.net.named_parameters()}
    e = hat.embeddings[0].detach().double().requires_grad_()
    a = torch.sigmoid(s * e)
    h = torch.relu(x.double().flatten(1) @ weights["trunk.1.weight"].T + weights["trunk.1.bias"]) * a[:40]
    h = torch.relu(h @ weights["trunk.3.weight"].T + weights["trunk.3.bias"]) * a[40:]
    out = h @ weights["heads.0.weight"].T + weights["heads.0.bias"]
    (grad,) = torch.autograd.grad(-out.log_softmax(1)[torch.arange(8), y].mean(), e)
    with torch.no_grad():
        wanted = grad * 400 / s * (torch.cosh((s * e).clamp(-50, 50)) + 1) / (torch.cosh(e) + 1)
    closed = e < -30 / s
    assert wanted[closed].abs().max() > 0.1
    torch.testing.assert_close(hat.embeddings[0].grad.double(), wanted, rtol=2e-3, atol=1e-4)


def test_one_step_by_hand():
    """Loss, gradients and updates of one step on two layers, written out in float64."""
    task = toy_tasks(1, train=8, valid=0.0)[0]
    hat = make_hat([task], widths=(5, 4), c=0.75, smax=400.0)
    hat.used = torch.zeros(9)
    start = {name: p.detach().double().clone().requires_grad_() for name, p in hat.named_parameters()}
    hat.learn(task, Trainer(Regime(epochs=1, batch=4, lr=0.1, schedule="constant", clip=0.0)))

    order = torch.randperm(8, generator=_batch_order())
    for number, index in enumerate(torch.split(order, 4)):
        s = (1 / 400, 400)[number]
        x, y = task.train.inputs(index).double().flatten(1), task.train.y[index]
        a = torch.sigmoid(s * start["embeddings.0"])
        h1 = torch.relu(x @ start["net.trunk.1.weight"].T + start["net.trunk.1.bias"]) * a[:5]
        h2 = torch.relu(h1 @ start["net.trunk.3.weight"].T + start["net.trunk.3.bias"]) * a[5:]
        out = h2 @ start["net.heads.0.weight"].T + start["net.heads.0.bias"]
        loss = -out.log_softmax(1)[torch.arange(4), y].mean() + 0.75 * a.mean()
        grads = dict(zip(start, torch.autograd.grad(loss, list(start.values())), strict=True))
        e = start["embeddings.0"].detach()
        q = grads["embeddings.0"] * 400 * (torch.cosh((s * e).clamp(-50, 50)) + 1) / (s * (torch.cosh(e) + 1))
        with torch.no_grad():
            for name, p in start.items():
                if name == "embeddings.0":
                    p.copy_((p - 0.05 * q).clamp(-6, 6))
                else:
                    p -= 0.1 * grads[name]
    for name, p in hat.named_parameters():
        torch.testing.assert_close(p.detach().double(), start[name].detach(), rtol=1e-4, atol=1e-5)


def _batch_order():
    from hatrack.seeds import derive, generator

    return generator(derive(0, "task", 0, "fit", 0), "batches", 0)


# Which weights are frozen


def frozen_by_loops(hat: HAT, gates: list[torch.Tensor], protect: str) -> dict[str, torch.Tensor]:
    """Eq. 2 weight by weight, for a trunk of linear layers 1 and 3."""
    held = {}
    sizes = {"1": 0, "3": len(hat.net.trunk[1].bias)}
    for layer, first in sizes.items():
        weight = hat.net.trunk[int(layer)].weight
        table = torch.zeros_like(weight)
        for i in range(weight.shape[0]):
            for j in range(weight.shape[1]):
                reads = [1.0 if layer == "1" else g[j].item() for g in gates]
                writes = [g[first + i].item() for g in gates]
                together = max(min(w, r) for w, r in zip(writes, reads, strict=True))
                table[i, j] = together if protect == "exact" else min(max(writes), max(reads))
        held[f"{layer}.weight"] = table
        held[f"{layer}.bias"] = torch.stack([g[first : first + weight.shape[0]] for g in gates]).amax(0)
    return held


@pytest.mark.parametrize("masks", ["binary", "soft"])
@pytest.mark.parametrize("protect", ["paper", "exact"])
def test_frozen_weights_follow_the_formula(masks, protect):
    tasks = toy_tasks(3)
    hat = make_hat(tasks, widths=(7, 6), masks=masks, protect=protect)
    draw = torch.Generator().manual_seed(1)
    for t in range(2):
        gates = torch.rand(13, generator=draw)
        hat.gates[t] = gates > 0.5 if masks == "binary" else gates
        hat.done[t] = True
    hat._freeze_used_weights()
    expected = frozen_by_loops(hat, [hat.gates[t].float() for t in range(2)], protect)
    for (name, want), partial in zip(expected.items(), hat.freezes, strict=True):
        before = partial.parameter.detach().clone()
        partial.parameter.grad = torch.ones_like(before)
        hat.edit_grads(place(0, 2), None)
        torch.testing.assert_close(partial.parameter.grad, (want < 1).float() if masks == "soft" else 1 - want, msg=name)
        with torch.no_grad():
            partial.parameter.add_(1)  # as long an update as any optimizer makes of it
            hat.constrain()
        torch.testing.assert_close(partial.parameter - before, 1 - want, msg=name, rtol=0, atol=1e-6)
        assert torch.equal(partial.parameter == before, want == 1), name
    assert any((want == 1).any() and (want == 0).any() for want in expected.values()) or masks == "soft"


def test_exact_protection_freezes_less_than_the_paper_s():
    tasks = toy_tasks(3)
    counts = {}
    for protect in ("paper", "exact"):
        hat = make_hat(tasks, widths=(40, 40), protect=protect)
        learn(hat, tasks[:2])
        hat._freeze_used_weights()
        counts[protect] = sum((partial.freeze.free == 0).sum().item() for partial in hat.freezes)
    assert 0 < counts["exact"] < counts["paper"]


def test_the_units_of_alexnet():
    """The first wide layer reads every unit of the last convolution through 2x2 places, channel after channel."""
    units = Units(alexnet((3, 32, 32)), torch.zeros(1, 3, 32, 32))
    assert list(units.layers.values()) == [
        slice(0, 64),
        slice(64, 192),
        slice(192, 448),
        slice(448, 2496),
        slice(2496, 4544),
    ]
    values = torch.rand(4544)
    spread = units.weight_masks(values)
    assert spread["4.weight"][5, 9, 2, 1] == min(values[64 + 5], values[9])  # (128, 64, 3, 3)
    assert torch.equal(spread["0.weight"][:, 0, 0, 0], values[:64]), "images are always on"
    reads = values[192:448].repeat_interleave(4)
    assert torch.equal(spread["13.weight"], torch.minimum(values[448:2496, None], reads[None]))


def test_gated_run_equals_a_gate_behind_every_layer():
    trunk = alexnet((3, 32, 32)).eval()
    units = Units(trunk, torch.zeros(1, 3, 32, 32))
    gates = torch.rand(4544)
    x = torch.rand(3, 3, 32, 32)
    expected = x
    sites = {3: slice(0, 64), 7: slice(64, 192), 11: slice(192, 448), 15: slice(448, 2496), 18: slice(2496, 4544)}
    for number, module in enumerate(trunk):
        expected = module(expected)
        if number in sites:
            gate = gates[sites[number]]
            expected = expected * (gate[:, None, None] if expected.dim() == 4 else gate)
    torch.testing.assert_close(units.run(x, gates), expected)


# The guarantee


def test_nothing_moves_under_adamw_with_tasks_added_later():
    """Five tasks on real images: AdamW with decay and kept state, two of the tasks not known at first."""
    tasks = BENCHMARKS["digits-and-clothes"](0, data="sample")[:5]
    hat = make_hat(tasks, widths=(100, 100), known=3)
    fit = Trainer(Regime(epochs=2, optimizer="adamw", lr=1e-3, weight_decay=0.01, keep_state=True))
    hat.learn(tasks[0], fit)
    first, moved = logits(hat, tasks[0]), hat.net.trunk[1].weight.detach().clone()
    for task in tasks[1:]:
        if task.index >= 3:
            hat.net.add_task(task.classes)
        hat.learn(task, fit)
    assert torch.equal(first.view(torch.int32), logits(hat, tasks[0]).view(torch.int32))
    assert first.std() > 0.1
    assert (hat.net.trunk[1].weight != moved).float().mean() > 0.1, "the free weights did move"


@pytest.mark.parametrize("optimizer", quick_and_slow(["sgd", "adam"], ["adam"]))
def test_c_lowers_the_share_of_units_used(optimizer):
    task = BENCHMARKS["smnist"](0, data="sample")[0]
    shares = []
    for c in (0.1, 0.75, 2.5):
        hat = make_hat([task], widths=(100, 100), c=c)
        hat.learn(task, Trainer(Regime(epochs=6, optimizer=optimizer, lr=0.05 if optimizer == "sgd" else 1e-3)))
        shares.append(hat.gates[0].float().mean().item())
    assert shares[0] > shares[1] > shares[2]


def trained_pair():
    tasks = toy_tasks(2)
    hat = make_hat(tasks, widths=(30, 30))
    learn(hat, tasks[:1], Trainer(Regime(epochs=20, batch=8, lr=0.1)))
    return tasks, hat


def test_free_weights_do_not_matter_and_frozen_ones_do():
    tasks, hat = trained_pair()
    before = logits(hat, tasks[0])
    hat._freeze_used_weights()
    hat.eval()
    hat(tasks[0].test.inputs(torch.arange(30)), 0).sum().backward()
    for partial in hat.freezes:
        free = partial.freeze.free != 0
        assert free.any()
        assert (~free).any()
        assert (partial.parameter.grad[free] == 0).all(), "a free weight has a gradient from the old task"
        kept = partial.parameter.detach().clone()
        partial.parameter.data = torch.where(free, 1e6, kept)
        assert torch.equal(before, logits(hat, tasks[0])), "moving free weights changed the old task"
        partial.parameter.data = torch.where(free, kept, kept + 1)
        assert not torch.equal(before, logits(hat, tasks[0])), "moving frozen weights changed nothing"
        partial.parameter.data = kept


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_a_diverged_task_can_t_reach_the_old_one(poison):
    tasks, hat = trained_pair()
    before = logits(hat, tasks[0])
    hat._freeze_used_weights()
    for p in hat.net.trunk.parameters():
        p.data.fill_(poison)
    with torch.no_grad():
        hat.constrain()
    assert torch.equal(before, logits(hat, tasks[0]))


def test_a_shared_head_is_used_by_every_task():
    tasks = toy_tasks(3)
    hat = make_hat(tasks, widths=(30, 30), heads="shared")
    fit = Trainer(Regime(epochs=5, batch=8, lr=0.1, optimizer="adamw", weight_decay=0.1))
    hat.learn(tasks[0], fit)
    first = logits(hat, tasks[0])
    learn(hat, tasks[1:], fit)
    assert torch.equal(first, logits(hat, tasks[0]))


def test_soft_masks_on_a_layer_of_doubles():
    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 12).double()

        def forward(self, x):
            return self.layer(x.flatten(1).double()).relu().float()

    tasks = toy_tasks(2)
    hat = HAT(Network(Doubles(), [3, 3], tasks[0].train.inputs(torch.arange(2))), masks="soft")
    learn(hat, tasks)
    assert list(hat.history) == [0, 1]


def test_soft_masks_forget_a_little_and_binary_ones_nothing():
    tasks = toy_tasks(3)
    changes = {}
    for masks in ("binary", "soft"):
        hat = make_hat(tasks, widths=(30, 30), masks=masks, smax=25.0)
        hat.learn(tasks[0], Trainer(Regime(epochs=5, batch=8, lr=0.1)))
        first = logits(hat, tasks[0])
        learn(hat, tasks[1:])
        changes[masks] = (first - logits(hat, tasks[0])).abs().max().item()
    assert changes["binary"] == 0 < changes["soft"]


def test_a_network_that_is_full_still_learns_its_head():
    tasks = toy_tasks(2)
    hat = make_hat(tasks, widths=(8, 8), embedding="uniform", c=0.0)
    learn(hat, tasks[:1])
    hat.gates[0] = True
    assert set(hat.usage().values()) == {1.0}
    before = logits(hat, tasks[0])
    with pytest.warns(UserWarning, match="'toy 1' .*5% .*2 of 2 layers"):
        learn(hat, tasks[1:])
    assert torch.equal(before, logits(hat, tasks[0]))
    assert logits(hat, tasks[1]).isfinite().all()


def test_initial_embeddings():
    tasks = toy_tasks(2)
    normal, uniform = (make_hat(tasks, widths=(500, 500), embedding=kind) for kind in ("normal", "uniform"))
    e = torch.cat(list(normal.embeddings))
    assert abs(e.mean()) < 0.1
    assert abs(e.std() - 1) < 0.1
    e = torch.cat(list(uniform.embeddings))
    assert e.min() >= 0
    assert e.max() <= 2
    assert abs(e.mean() - 1) < 0.1
    assert not torch.equal(uniform.embeddings[0], uniform.embeddings[1])


def test_a_module_that_is_used_twice():
    """Its second use is found, and its weights are frozen for both."""
    tasks = toy_tasks(3)
    act, layer = nn.ReLU(), nn.Linear(12, 12)
    trunk = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), act, layer, act, layer, act)
    net = Network(trunk, [3, 3, 3], torch.zeros(1, 1, 4, 4))
    hat = HAT(net)
    x = tasks[0].test.inputs(torch.arange(5))
    assert torch.equal(hat.units.run(x, torch.ones(hat.units.count, dtype=torch.bool)), trunk(x))
    fit = Trainer(Regime(epochs=5, batch=8, lr=0.05, optimizer="adamw", weight_decay=0.1))
    hat.learn(tasks[0], fit)
    first = logits(hat, tasks[0])
    learn(hat, tasks[1:], fit)
    assert torch.equal(first, logits(hat, tasks[0]))


def test_protection_survives_a_load_that_replaces_the_parameters():
    tasks = toy_tasks(3)
    hat = make_hat(tasks, widths=(30, 30))
    learn(hat, tasks[:1])
    first = logits(hat, tasks[0])
    hat.load_state_dict({key: value.clone() for key, value in hat.state_dict().items()}, assign=True)
    learn(hat, tasks[1:])
    assert torch.equal(first, logits(hat, tasks[0]))


@pytest.mark.parametrize("bad", [{"index": 9}, {"index": -1}, {"classes": 7}])
def test_a_task_that_does_not_fit_changes_nothing(bad):
    tasks = toy_tasks(2)
    hat = make_hat(tasks, widths=(30, 30))
    learn(hat, tasks[:1])
    first = logits(hat, tasks[0])
    with pytest.raises(ValueError, match="task 'toy 1' has"):
        hat.learn(replace(tasks[1], **bad), Trainer(Regime(epochs=1)))
    assert hat.done.tolist() == [True, False]
    learn(hat, tasks[1:])
    assert torch.equal(first, logits(hat, tasks[0]))


@pytest.mark.parametrize(("option", "value"), [("smax", 0.5), ("c", -0.1), ("masks", "hard"), ("gate_lr", 0.0)])
def test_hyper_parameters_out_of_range(option, value):
    with pytest.raises(ValueError, match=f"{option} must be .* not {value!r}"):
        make_hat(toy_tasks(1), **{option: value})


def test_layers_that_the_user_froze_stay_open_and_cost_nothing():
    tasks = toy_tasks(2)
    trunk = mlp(tasks[0].shape, widths=(8, 8), dropout=0.0, input_dropout=0.0)
    net = Network(trunk, [3, 3], tasks[0].train.inputs(torch.arange(2)), freeze="1")
    hat = HAT(net)
    learn(hat, tasks)
    assert hat.gates[:, :8].all()
    assert list(hat.usage()) == ["3"]
    gates = torch.rand(16)
    hat.used.zero_()
    assert hat.capacity(gates) == pytest.approx(gates[8:].mean().item())


@pytest.mark.parametrize("masks", ["binary", "soft"])
def test_an_interruption_after_the_fit_is_rolled_back(masks, monkeypatch):
    tasks, others = toy_tasks(2), toy_tasks(2, seed=5)
    hat = make_hat(tasks, masks=masks)
    learn(hat, tasks)
    before = {key: value.clone() for key, value in hat.state_dict().items()}

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(hat.norms), "recompute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hat.learn(others[0], Trainer(Regime(epochs=2, batch=16, lr=0.1)))
    for key, value in hat.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_the_compensated_gradient_has_no_derivative():
    """It is no gradient of a function, so that a second derivative would be wrong in silence."""
    e = torch.randn(3, requires_grad=True)
    gates, _ = AnnealedGates.apply(e, torch.tensor(2.0), 400.0, torch.ones(3), None, "rounded")
    (grad,) = torch.autograd.grad(gates.square().sum(), e, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_biases_that_are_trained_alone_are_learned_by_every_task():
    """The weights are frozen by the user (BitFit), so that the gates of their units are always open."""
    tasks, answers = toy_tasks(3), []
    trunk = mlp(tasks[0].shape, widths=(24, 24), dropout=0.0, input_dropout=0.0)
    biases = [name for name, p in trunk.named_parameters() if p.dim() == 1]
    for p in trunk.parameters():
        p.requires_grad_(p.dim() == 1)
    method = HAT(Network(trunk, tasks=tasks))
    for task in tasks:
        learn(method, [task])
        answers.append(logits(method, task))
    assert all(torch.equal(logits(method, task), then) for task, then in zip(tasks, answers, strict=True))
    for name in biases:
        own = [trunk.get_parameter(name), *(method.norms.of(task)[name] for task in (1, 2))]
        assert not any(torch.equal(one, two) for one, two in itertools.combinations(own, 2)), name
