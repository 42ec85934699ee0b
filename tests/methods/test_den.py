"""DEN: selection, new units, copies and timestamps against values computed by hand, and the expandable layers."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hatrack import Diverged, Network, Regime, Trainer
from hatrack.methods.den import DEN, shrink_rows
from hatrack.methods.parts.expandable import NOT_ADDED, masks_between, masks_without
from hatrack.networks.mlp import mlp
from hatrack.seeds import seeded
from tests.helpers.learning import FunctionFit, learn, logits
from tests.helpers.toys import toy_tasks


def make(tasks, *, widths=(8, 7), heads="multi", room=30, expand=3, **options) -> DEN:
    with seeded(0, "weights"):
        trunk = mlp(tasks[0].shape, widths=widths, dropout=0.0, input_dropout=0.0)
    net = Network(trunk, [t.classes for t in tasks], tasks[0].train.inputs(torch.arange(2)), heads=heads)
    return DEN(net, room=room, expand=expand, **options)


def short(**changes) -> Trainer:
    return Trainer(Regime(**{"epochs": 3, "batch": 16, "lr": 0.05, **changes}))


def randomise(method: DEN, task: int, seed: int = 0) -> None:
    """Write random values into every parameter of the network and of its spare units."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in method.room.layers(method.net, task):
            for parameter in filter(lambda p: p is not None, layer):
                parameter.copy_(torch.randn(parameter.shape, generator=draw) / 4)


# Expandable layers


@pytest.mark.parametrize("heads", ["multi", "shared"])
def test_spare_units_change_nothing(heads):
    tasks = toy_tasks(2)
    method = make(tasks, heads=heads)
    randomise(method, 1)
    x = tasks[1].test.inputs(torch.arange(30))
    torch.testing.assert_close(method(x, 1), method.net(x, 1))
    assert method.widths() == {"1": 8, "3": 7}


def test_a_joined_layer_is_split_into_the_parameters_it_was_made_of():
    method = make(toy_tasks(2))
    randomise(method, 1)
    for layer, values in zip(method.room.layers(method.net, 1), method.room.read(method.net, 1), strict=True):
        assert all(torch.equal(parameter, part) for parameter, part in layer.split(values))
        assert sum(parameter.numel() for parameter, _ in layer.split(values)) == values.weight.numel() + values.bias.numel()


def test_masks_between_units_by_a_loop():
    method = make(toy_tasks(1), room=4)
    draw = torch.Generator().manual_seed(0)
    few, more = ([torch.rand(n + 4, generator=draw) < share for n in (8, 7)] for share in (0.3, 0.6))
    more = [m | f for m, f in zip(more, few, strict=True)]
    layers = method.room.read(method.net, 0)
    masks, rest = masks_between(more, layers), masks_without(masks_between(more, layers), masks_between(few, layers))
    for i in range(11):
        for j in range(12):
            assert masks[1].weight[i, j] == (more[1][i] and more[0][j])
            assert rest[1].weight[i, j] == (more[1][i] and more[0][j] and not (few[1][i] and few[0][j]))
        assert masks[1].bias[i] == more[1][i]
        assert torch.equal(masks[2].weight[:, i], more[1][i].expand(3))
    assert torch.equal(masks[0].weight, more[0][:, None].expand(12, 16)), "images are read by every unit"
    assert torch.equal(rest[2].weight, masks[2].weight), "the head stays whole"


@pytest.mark.parametrize("poison", [1e6, math.inf, math.nan])
def test_units_that_were_added_later_do_not_change_an_older_task(poison):
    tasks = toy_tasks(2)
    method = make(tasks)
    method.room.born[:, :2], method.room.born[:, 2:5] = 1, 2
    method.turns.copy_(torch.tensor([1, 2]))
    randomise(method, 1)
    randomise(method, 0)
    before, later = logits(method, tasks[0]), logits(method, tasks[1])
    layers = method.room.read(method.net, 0)
    for level, layer in enumerate(layers):
        if level < 2:
            layer.weight[-28:], layer.bias[-28:] = poison, poison
        if level:
            layer.weight[:, -28:] = 1e6
    method.room.write(method.net, 0, layers)
    assert torch.equal(before, logits(method, tasks[0]))
    assert not torch.equal(later, logits(method, tasks[1]))
    layers[1].weight[7, 0] += 1  # the first spare unit, which was added in time
    method.room.write(method.net, 0, layers)
    assert not torch.equal(before, logits(method, tasks[0]))


@pytest.mark.parametrize(
    ("trunk", "said"),
    [
        (nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten()), r"0 \(Conv2d.* can't grow"),
        (nn.Sequential(nn.Flatten(), nn.Linear(16, 16, bias=False)), r"1 \(Linear.* can't grow"),
        (nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.Softmax(1)), r"1 \(Softmax.* can't grow"),
        (nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.LayerNorm(16)), r"2 \(LayerNorm\)"),
    ],
)
def test_a_trunk_that_can_t_grow_is_refused_by_name(trunk, said):
    with pytest.raises(ValueError, match=said):
        DEN(Network(trunk, [3], torch.zeros(2, 1, 4, 4)))


# Selection


def test_selection_worked_out_by_hand():
    """Head reads unit 1 of layer 2; that reads units 0 and 2 of layer 1. Unit 3 of layer 1 is read by others only."""
    method = make(toy_tasks(1), widths=(4, 3))
    first, second, head = method.room.read(method.net, 0)
    for layer in (first, second, head):
        layer.weight.zero_()
    first.weight[:4, 5] = 1.0
    second.weight[1, 0] = second.weight[1, 2] = -0.5
    second.weight[0, 3] = 2.0
    head.weight[2, 1] = 1e-6
    second.weight[3, 1] = head.weight[0, 3] = 1.0  # a spare unit that was not added
    method.room.write(method.net, 0, [first, second, head])
    chosen = method.select(0)
    assert [c.nonzero().flatten().tolist() for c in chosen] == [[0, 2], [1]]


def test_selection_is_a_search_from_the_head():
    method = make(toy_tasks(1), widths=(8, 7), room=5)
    method.room.born[0, :3], method.room.born[1, :2] = 1, 1
    randomise(method, 0)
    draw = torch.Generator().manual_seed(1)
    layers = method.room.read(method.net, 0)
    for layer in layers:
        layer.weight.mul_(torch.rand(layer.weight.shape, generator=draw) < 0.12)
    method.room.write(method.net, 0, layers)
    exists, queue, found = [11, 9], [(2, k) for k in range(3)], set()
    while queue:
        level, unit = queue.pop(0)
        for below in range(exists[level - 1]) if level else ():
            if layers[level].weight[unit, below] != 0 and (level - 1, below) not in found:
                found.add((level - 1, below))
                queue.append((level - 1, below))
    chosen = method.select(0)
    assert {(level, k) for level, c in enumerate(chosen) for k in c.nonzero().flatten().tolist()} == found
    assert 0 < sum(level == 0 for level, _ in found) < 11
    assert 0 < sum(level == 1 for level, _ in found) < 9


class Recorder:
    """Trains as a trainer does and records the network before and after every fit."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.regime, self.fits = trainer, trainer.regime, []

    def __call__(self, method, task, *, plain=None, **changes):
        assert plain is None
        before = method.room.read(method.net, task.index)
        chosen = method.select(task.index)
        fitted = self.trainer(method, task, **changes)
        self.fits.append((before, method.room.read(method.net, task.index), chosen, changes))
        return fitted


def test_the_phases_of_a_task_and_what_moves_in_each():
    tasks = toy_tasks(2)
    method = make(tasks, head_epochs=2, expand_epochs=1, split_epochs=4, l1=1e-3, split_threshold=0.01)
    fit = Recorder(short(optimizer="adamw", lr=0.01, weight_decay=0.1))
    learn(method, tasks, fit)
    assert [changes for *_, changes in fit.fits] == [{}, {"epochs": 2}, {}, {"epochs": 1}, {"epochs": 4}]
    moved = [
        [(a.weight != b.weight, a.bias != b.bias) for a, b in zip(before, after, strict=True)]
        for before, after, *_ in fit.fits
    ]
    _, head, retrain, expand, split = moved
    assert not any(weight.any() or bias.any() for weight, bias in head[:2])
    assert head[2][0].any()
    chosen = fit.fits[2][2]
    for level in (0, 1):
        reads = chosen[0] if level else torch.ones(16, dtype=torch.bool)
        assert not retrain[level][0][~chosen[level]].any()
        assert not retrain[level][0][:, ~reads].any()
        assert retrain[level][0].any()
        assert not expand[level][1][: (8, 7)[level]].any()
        assert expand[level][0][(8, 7)[level] :][:3].any(), "new units learn"
        assert split[level][0].any()
    assert not expand[0][0][:8].any()
    assert not expand[1][0][:7, :8].any(), "in the expansion old units learn only to read new ones"


# New units


def test_new_units_are_read_by_nothing_old_and_change_no_logits():
    tasks = toy_tasks(1)
    method = make(tasks, expand=4)
    randomise(method, 0)
    before = logits(method, tasks[0])
    assert method._expand(0, 1)
    assert method.widths() == {"1": 12, "3": 11}
    torch.testing.assert_close(before, logits(method, tasks[0]))
    _, second, head = method.room.read(method.net, 0)
    assert (second.weight[:7, 8:12] == 0).all()
    assert (head.weight[:, 7:11] == 0).all()
    assert (second.weight[7:11, :12] != 0).all()
    assert (second.weight[7:11, 12:] == 0).all(), "they read what exists"
    assert second.weight[7:11].abs().max() <= 1 / math.sqrt(12)


def test_no_more_units_are_added_than_there_are_spare_ones():
    method = make(toy_tasks(1), room=5, expand=4)
    assert [method._expand(0, turn) for turn in (1, 2, 3)] == [True, True, False]
    assert method.widths() == {"1": 13, "3": 12}
    assert method.room.born.tolist() == [[1, 1, 1, 1, 2]] * 2


def test_new_units_without_inputs_are_removed():
    method = make(toy_tasks(1), expand=3)
    method._expand(0, 1)
    layers = method.room.read(method.net, 0)
    layers[0].weight[9] = 0
    layers[1].weight[8], layers[1].weight[8, 20] = 0, 1.0  # reads only a unit that does not exist
    layers[1].weight[2] = 0  # an old one stays
    method.room.write(method.net, 0, layers)
    method._remove_unneeded(0, 1)
    assert method.room.born[:, :3].tolist() == [[1, NOT_ADDED, 1], [1, NOT_ADDED, 1]]
    assert method.new_units == []


def test_strong_group_sparsity_leaves_no_new_unit():
    tasks = toy_tasks(2)
    widths = []
    for group in (0.0, 0.5):
        method = make(tasks, group=group, split_threshold=1e6)
        learn(method, tasks, short())
        widths.append(method.widths())
    assert widths == [{"1": 11, "3": 10}, {"1": 8, "3": 7}]


def test_units_are_added_only_if_the_loss_is_high():
    tasks = toy_tasks(2)
    method = make(tasks, loss_threshold=1e6, split_threshold=1e6)
    fit = short()
    learn(method, tasks, fit)
    assert method.widths() == {"1": 8, "3": 7}
    assert len(fit.fits) == 3


# Copies


def drift_by_loop(now, before, level, inputs, units) -> list[float]:
    rows = []
    for i in range(units):
        total = sum((now[level].weight[i, j] - before[level].weight[i, j]).item() ** 2 for j in range(inputs))
        rows.append(math.sqrt(total))
    return rows


def test_the_units_that_moved_furthest_are_copied_first():
    method = make(toy_tasks(1), expand=2)
    method.split_threshold = 0.5
    randomise(method, 0)
    old = method.room.read(method.net, 0)
    existing = masks_between(method.units_of(0), old)
    randomise(method, 0, seed=1)
    now = method.room.read(method.net, 0)
    for level, (inputs, units) in enumerate([(16, 8), (8, 7)]):
        rows = drift_by_loop(now, old, level, inputs, units)
        wanted = sorted(range(units), key=lambda i: -rows[i])[:2]
        assert method.drifted(now[level].weight, old[level].weight, existing[level].weight).tolist() == wanted
    method.split_threshold = 1e3
    assert len(method.drifted(now[0].weight, old[0].weight, existing[0].weight)) == 0


@pytest.mark.parametrize("heads", ["multi", "shared"])
def test_a_copy_keeps_the_new_weights_and_the_unit_gets_the_old_ones(heads):
    method = make(toy_tasks(2), widths=(4, 3), expand=2, heads=heads, split_threshold=0.1)
    randomise(method, 1)
    method._expand(1, 2)  # units 4, 5 of the first layer and 3, 4 of the second are new
    old = method.room.read(method.net, 1)
    existing = [replace_units(mask, level) for level, mask in enumerate(masks_between(method.units_of(1), old))]
    now = method.room.read(method.net, 1)
    now[0].weight[1] += 1  # unit 1 of the first layer moves, and unit 2 of the second
    now[0].bias[1] += 1
    now[1].weight[2, :4] -= 1
    now[1].weight[0, 3] += 0.01  # unit 0 of the second a little
    now[1].weight[3:5, :6] = 0.7
    now[2].weight[:, :5] = 0.3
    method.room.write(method.net, 1, now)
    assert method._split(1, 2, old, existing)
    first, second, head = method.room.read(method.net, 1)
    copy_1, copy_2 = 6, 5  # the next spare units of the two layers
    assert torch.equal(first.weight[1].view(torch.int32), old[0].weight[1].view(torch.int32)), "back, bit for bit"
    assert first.bias[1] == old[0].bias[1]
    assert torch.equal(first.weight[copy_1], now[0].weight[1])
    assert first.bias[copy_1] == now[0].bias[1]
    assert torch.equal(second.weight[2, :6].view(torch.int32), old[1].weight[2, :6].view(torch.int32))
    assert second.weight[2, copy_1] == 0
    assert second.weight[0, :4].tolist() == now[1].weight[0, :4].tolist(), "a unit that stayed reads what it read"
    assert second.weight[0, copy_1] == 0
    for unit, origin in ((copy_2, 2), (3, 3), (4, 4)):  # the copy and the new units read the copy below
        assert second.weight[unit, copy_1] == now[1].weight[origin, 1]
        assert second.weight[unit, 1] == 0
        assert torch.equal(second.weight[unit, [0, 2, 3, 4, 5]], now[1].weight[origin, [0, 2, 3, 4, 5]])
    if heads == "multi":
        assert torch.equal(head.weight[:, copy_2], now[2].weight[:, 2])
        assert (head.weight[:, 2] == 0).all()
    else:
        assert torch.equal(head.weight[:, 2], now[2].weight[:, 2]), "earlier tasks read it"
        assert (head.weight[:, copy_2] == 0).all()
    assert method.room.born[:, :4].tolist() == [[2, 2, 2, NOT_ADDED]] * 2


def replace_units(mask, level):
    """The weights that existed before the new units of the test above."""
    units, inputs = ((4, 16), (3, 4), (3, 3))[level]
    weight = torch.zeros_like(mask.weight)
    weight[:units, :inputs] = True
    return mask._replace(weight=weight)


def test_copies_in_the_last_layer_change_no_logits_of_the_task():
    tasks = toy_tasks(1)
    method = make(tasks, expand=3, split_threshold=0.01)
    randomise(method, 0)
    method.turns[0] = 2
    old = method.room.read(method.net, 0)
    with torch.no_grad():
        method.net.trunk[3].weight[[1, 4]] += 0.5
    before = logits(method, tasks[0])
    assert method._split(0, 2, old, masks_between(method.units_of(0), old))
    assert method.widths() == {"1": 8, "3": 9}
    torch.testing.assert_close(before, logits(method, tasks[0]))
    assert torch.equal(old[1].weight[:7, :8], method.net.trunk[3].weight)


# In the step


def test_proximal_steps_by_plain_loops():
    method = make(toy_tasks(1), room=4, l1=0.05, group=0.3)
    randomise(method, 0)
    method.trained = [method.net.trunk[1].weight, method.net.trunk[1].bias, *method.room.rows]
    method.new_units = [torch.tensor([True, False, True, False]), torch.tensor([False, True, True, True])]
    method.room.rows[0].data[2] = 0.06  # becomes 0: its norm is less than the group's share
    before = {name: p.detach().double().clone() for name, p in method.named_parameters()}
    with torch.no_grad():
        method.constrain()
    for name, p in method.named_parameters():
        wanted = before[name].clone()
        if any(p is free for free in method.trained) and p.dim() == 2:
            for i in range(p.shape[0]):
                for j in range(p.shape[1]):
                    value = before[name][i, j].item()
                    wanted[i, j] = math.copysign(max(abs(value) - 0.05, 0), value)
                if name.startswith("room.rows") and method.new_units[int(name[-1])][i]:
                    norm = math.sqrt(sum(v**2 for v in wanted[i].tolist()))
                    for j in range(p.shape[1]):
                        wanted[i, j] *= max(1 - 0.3 / norm, 0)
        torch.testing.assert_close(p.detach().double(), wanted, rtol=1e-5, atol=1e-6, msg=name)
    assert (method.room.rows[0][2] == 0).all()


def test_shrinking_rows_is_the_minimum_of_what_it_should_minimise():
    """Of t |u| + |u - w|^2 / 2 over u along w, searched on a fine grid; and a row of zeros stays zero."""
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    for by in (0.0, 1.0):
        shrunk = shrink_rows(rows, by)
        assert shrunk.isfinite().all()
        for row, found in zip(rows[:2].double(), shrunk.double(), strict=False):
            shares = torch.linspace(0, 1, 100001, dtype=torch.float64)[:, None]
            values = by * (shares * row).norm(dim=1) + (shares * row - row).square().sum(1) / 2
            torch.testing.assert_close(found, (shares * row)[values.argmin()], rtol=0, atol=1e-4)
        assert (shrunk[2] == 0).all()


@pytest.mark.parametrize("heads", ["multi", "shared"])
def test_the_loss_by_plain_loops(heads):
    tasks = toy_tasks(2)
    method = make(tasks, heads=heads, l2=0.02, drift=0.7, room=4)
    method.room.born[:, 0] = 1
    randomise(method, 1)
    old = method.room.read(method.net, 1)
    method._set_anchors(1, old, masks_between(method.units_of(1), old))
    randomise(method, 1, seed=1)
    method.trained = [method.room.rows[0], method.net.trunk[3].bias]
    index = torch.arange(5)
    batch = tasks[1].train.take(index, torch.tensor(0), torch.tensor(1), 5)
    wanted = F.cross_entropy(method(batch.x, 1), batch.y).item()
    wanted += 0.01 * sum(v**2 for p in method.trained for v in p.flatten().tolist())
    now = method.room.read(method.net, 1)
    sizes = [(9, 16), (8, 9), (3, 8)]
    for level, (units, inputs) in enumerate(sizes if heads == "shared" else sizes[:2]):
        for i in range(units):
            wanted += 0.35 * (now[level].bias[i] - old[level].bias[i]).item() ** 2
            for j in range(inputs):
                wanted += 0.35 * (now[level].weight[i, j] - old[level].weight[i, j]).item() ** 2
    assert method.loss(batch).item() == pytest.approx(wanted, rel=1e-5)


# A whole task


def test_the_network_grows_from_task_to_task_and_older_tasks_use_their_own_units():
    tasks = toy_tasks(3)
    method = make(tasks, split_threshold=0.01)
    sizes = []
    for task in tasks:
        method.learn(task, short())
        sizes.append(sum(method.widths().values()))
    assert sizes[0] == 15 < sizes[1] < sizes[2]
    assert [sum(int(s.sum()) for s in method.units_of(k)) for k in range(3)] == sizes


def test_a_strong_pull_and_copies_protect_what_plain_sgd_loses():
    tasks = toy_tasks(2)
    changes = {}
    for drift in (0.0, 50.0):
        method = make(tasks, widths=(20, 20), drift=drift)
        fit = short(epochs=10, optimizer="adam", lr=0.01)
        method.learn(tasks[0], fit)
        before = logits(method, tasks[0])
        method.learn(tasks[1], fit)
        changes[drift] = (before - logits(method, tasks[0])).abs().max().item()
    assert changes[50.0] < changes[0.0] / 3


def test_a_task_that_is_learned_again_frees_its_units():
    tasks = toy_tasks(2)
    method = make(tasks, split_threshold=0.01)
    learn(method, [*tasks, tasks[1], tasks[1]], short())
    assert (method.room.born == 2).sum() > 6
    assert (method.room.born[:, 6:] == NOT_ADDED).all(), "those of three new units and three copies are used again"
    method.learn(tasks[0], short())
    assert method.turns.tolist() == [3, 2]
    assert (method.room.born == 2).any(), "the other task keeps its units"


def test_a_later_phase_that_fails_is_rolled_back():
    tasks = toy_tasks(2)
    method = make(tasks)
    method.learn(tasks[0], short())
    before = {key: value.clone() for key, value in method.state_dict().items()}
    trainer, calls = short(), []

    def fit(method, task, **changes):
        calls.append(changes)
        return trainer(method, task, **changes, **({"lr": 3e38, "clip": 0.0} if len(calls) == 3 else {}))

    with pytest.raises(Diverged):
        method.learn(tasks[1], FunctionFit(fit))
    assert len(calls) == 3
    assert all(torch.equal(before[key], value) for key, value in method.state_dict().items())
    with pytest.raises(ValueError, match="'toy 1' has number 9"):
        method.learn(replace(tasks[1], index=9), trainer)


@pytest.mark.parametrize(("option", "value"), [("room", 0), ("expand", -1), ("l1", -0.1), ("drift", math.inf)])
def test_hyper_parameters_out_of_range(option, value):
    with pytest.raises(ValueError, match=f"{option} must be .* not {value!r}"):
        make(toy_tasks(1), **{option: value})
