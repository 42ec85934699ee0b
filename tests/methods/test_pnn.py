"""Progressive neural networks: the forward pass, the sizes, what is trained, what is read."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hatrack import METHODS, NETWORKS, Network, Regime, Trainer
from hatrack.methods.pnn import PNN
from tests.helpers.counting import CIFAR, MIXTURE, count
from tests.helpers.learning import OPTIMIZERS, learn, logits
from tests.helpers.tiers import every_value
from tests.helpers.toys import toy_tasks
from tests.helpers.trunks import small_conv, small_mlp


def make(trunk, classes=(3, 3, 3), *, net=None, **options):
    return PNN(Network(trunk, list(classes), torch.zeros(2, 1, 4, 4), **(net or {})), **options)


def trainer(**changes):
    return Trainer(Regime(**{"epochs": 3, "batch": 16, "lr": 0.1, **changes}))


# Sizes


def used_and_dead(widths, classes):
    """Parameters of the HAT authors' AlexNet columns by hand: those in use, and those of their laterals into the outputs.

    Filters of 4x4, 3x3 and 2x2 on 3 channels, 2x2 positions at the end of the convolutions.
    """
    one, two, three, four, five = widths
    used = dead = 0
    for t, outputs in enumerate(classes):
        used += one * (3 * 16 + 1) + two * (one * 9 + 1) + three * (two * 4 + 1)
        used += four * (4 * three + 1) + five * (four + 1) + outputs * (five + 1)
        if t:  # scales, V and U of each lateral
            used += t + one * (t * one + 1) + two * (one * 9 + 1)
            used += t + two * (t * two + 1) + three * (two * 4 + 1)
            used += t + 4 * three * (t * 4 * three + 1) + four * (4 * three + 1)
            used += t + four * (t * four + 1) + five * (four + 1)
            dead += t + five * (t * five + 1) + outputs * (five + 1)
    return used, dead


@pytest.mark.parametrize(
    ("classes", "widths", "authors"),
    [(MIXTURE, (8, 17, 35, 285, 285), 7_160_706), (CIFAR, (7, 14, 28, 228, 228), 6_841_835)],
)
def test_alexnet_at_the_size_of_one(classes, widths, authors):
    net = Network(NETWORKS["alexnet"]((3, 32, 32)), classes, torch.zeros(1, 3, 32, 32))
    method = PNN(net, columns="budget")
    used, dead = used_and_dead(widths, classes)
    assert method.widths == list(widths)
    assert count(method) - count(net) == used == method.num_parameters()
    assert used + dead == authors


def test_full_columns_of_a_small_network():
    net = Network(small_mlp(), [3, 2, 4], torch.zeros(2, 1, 4, 4))
    column = 12 * 17 + 10 * 13
    lateral = [j + 12 * (12 * j + 1) + 10 * 13 for j in (1, 2)]  # into the second layer, from the first of j columns
    heads = 11 * (3 + 2 + 4)
    method = PNN(net)
    assert (
        count(method) == method.num_parameters() == 3 * column + sum(lateral) + heads
    )  # the trunk and the heads are used, not copied


def test_a_column_has_a_unit_at_least():
    assert make(small_mlp(), columns="budget", budget_tasks=100).widths == [1, 1]


# The forward pass


def by_hand(state, x, columns, layers, run):
    """The features of the last of so many columns; `run(layer, x, weight, bias)` applies a layer, without activation."""
    before = []
    for c in range(columns):
        own = []
        for n, (kind, act) in enumerate(layers):
            h = run(kind, own[-1] if n else x, *(state[f"columns.{c}.stages.{n}.layer.{p}"] for p in ("weight", "bias")))
            if c and n:
                place = f"columns.{c}.laterals.{n - 1}"
                scale = state[f"{place}.scale"]
                joined = torch.cat([scale[j] * before[j][n - 1] for j in range(c)], 1)
                v = run("1x1" if kind != "fc" else "fc", joined, state[f"{place}.v.weight"], state[f"{place}.v.bias"])
                h = h + run(kind, torch.maximum(v, torch.zeros(())), state[f"{place}.u.weight"], state[f"{place}.u.bias"])
            own.append(act(h))
        before.append(own)
    return before[-1][-1]


def apply(kind, x, weight, bias):
    match kind:
        case "fc":
            return x.flatten(1) @ weight.T + bias
        case "padded":
            return F.conv2d(x, weight, bias, padding=1)
        case _:
            return F.conv2d(x, weight, bias)


LAYERS = {
    "mlp": (small_mlp, [("fc", torch.relu), ("fc", torch.relu)]),
    "conv": (
        small_conv,
        [
            ("padded", torch.relu),
            ("plain", lambda h: F.max_pool2d(torch.tanh(h), 2).flatten(1)),
            ("fc", torch.relu),
        ],
    ),
}


@pytest.mark.parametrize("network", LAYERS)
@pytest.mark.parametrize("columns", ["full", "budget"])
def test_the_forward_pass_against_a_plain_loop(network, columns):
    build, layers = LAYERS[network]
    method = make(build(), columns=columns)
    learn(method, toy_tasks(3), trainer())
    method.double().eval()
    x = torch.randn(4, 1, 4, 4, dtype=torch.float64)
    for task in range(3):
        features = by_hand(method.state_dict(), x, task + 1, layers, apply)
        head = method.heads[task]
        torch.testing.assert_close(method(x, task), features @ head.weight.T + head.bias)


def test_scales_are_drawn_from_a_normal_distribution():
    method = make(small_mlp(), [2] * 40, columns="budget")
    scales = torch.cat([lateral.scale for column in method.columns for lateral in column.laterals]).detach()
    assert len(scales) == 39 * 40 / 2
    assert abs(scales.mean()) < 0.1
    assert abs(scales.std() - 1) < 0.1


def test_xavier_reaches_the_columns():
    method = make(small_mlp(), net={"init": "xavier"})
    for column in method.columns[1:]:
        for module in column.modules():
            if isinstance(module, nn.Linear):
                assert not module.bias.any()
    assert method.columns[1].laterals[0].scale.any()


# Learning


def test_the_first_full_column_is_the_network_itself():
    tasks = toy_tasks(3)
    method = make(small_mlp())
    twin = METHODS["sgd"](Network(small_mlp(), [3, 3, 3], torch.zeros(2, 1, 4, 4)))
    for one in (method, twin):
        one.learn(tasks[0], trainer())
    assert torch.equal(logits(method, tasks[0]), logits(twin, tasks[0]))


def test_only_the_newest_column_is_trained_and_has_dropout():
    tasks, seen = toy_tasks(3), []

    class Looking(PNN):
        def loss(self, batch):
            names = {name.split(".")[1] for name, p in self.columns.named_parameters(prefix="c") if p.requires_grad}
            modes = [{m.training for m in column.modules()} for column in self.columns]
            heads = [head.weight.requires_grad for head in self.heads]
            seen.append((names, modes, heads))
            return super().loss(batch)

    method = Looking(Network(small_mlp(), [3, 3, 3], torch.zeros(2, 1, 4, 4)))
    for task in tasks:
        seen.clear()
        method.learn(task, trainer())
        k = task.index
        on = [{n == k} for n in range(3)]
        assert seen
        assert all(s == ({str(k)}, on, [n == k for n in range(3)]) for s in seen)
    assert all(p.requires_grad for p in method.parameters()), "after a task all is as before"


def test_later_columns_read_and_train_their_laterals():
    tasks = toy_tasks(2)
    method = make(small_mlp(), (3, 3))
    before = {key: value.clone() for key, value in method.columns[1].laterals.state_dict().items()}
    learn(method, tasks, trainer())
    assert not any(torch.equal(value, before[key]) for key, value in method.columns[1].laterals.state_dict().items())
    first = [logits(method, task) for task in tasks]
    with torch.no_grad():
        method.columns[0].stages[0].layer.weight.mul_(1.5)
    assert not torch.equal(logits(method, tasks[0]), first[0])
    assert not torch.equal(logits(method, tasks[1]), first[1])


@pytest.mark.parametrize(("options", "optimizer"), every_value([{}, {"columns": "budget", "budget_tasks": 2}], OPTIMIZERS))
def test_nothing_is_forgotten_with_convolutions_in_any_order(optimizer, options):
    tasks = toy_tasks(4)
    method = make(small_conv(), [3] * 4, **options)
    fit = trainer(**OPTIMIZERS[optimizer])
    after = {}
    for k in (2, 0, 3, 1):
        method.learn(tasks[k], fit)
        after[k] = logits(method, tasks[k])
        assert all(torch.equal(logits(method, tasks[j]), kept) for j, kept in after.items())
    assert method.owned.tolist() == [1, 3, 0, 2]
    assert all(kept.std(0).min() > 0 for kept in after.values())


def test_a_task_that_is_learned_again_gets_a_new_column():
    tasks, others = toy_tasks(3), toy_tasks(3, seed=5)
    method = make(small_mlp())
    learn(method, [*tasks[:2], others[0]], trainer())
    assert method.owned.tolist() == [2, 1, -1]
    before = [logits(method, task) for task in (others[0], tasks[1])]
    method.learn(tasks[2], trainer())
    assert method.owned.tolist() == [2, 1, 3]
    assert len(method.columns) == 4
    for kept, task in zip(before, (others[0], tasks[1]), strict=True):
        assert torch.equal(logits(method, task), kept)


def test_learning_again_and_adding_tasks_go_together():
    """A task that is not learned yet answers by the next column, whether or not it was known in advance."""
    tasks = toy_tasks(2)
    early, late = make(small_mlp(), (3, 3)), make(small_mlp(), (3,))
    for one in (early, late):
        learn(one, [tasks[0], tasks[0]], trainer())
    late.net.add_task(3)
    for task in tasks:
        assert torch.equal(logits(early, task), logits(late, task))
    assert len(early.columns) == len(late.columns) == 3
    for one in (early, late):
        one.learn(tasks[1], trainer())
        assert one.owned.tolist() == [1, 2]
    for task in tasks:
        assert torch.equal(logits(early, task), logits(late, task))


def test_a_state_with_more_or_fewer_columns_can_be_loaded():
    tasks = toy_tasks(2)
    method, twin = (make(small_mlp(), (3, 3)) for _ in range(2))
    learn(method, tasks, trainer())
    early = {key: value.clone() for key, value in method.state_dict().items()}
    learn(method, tasks[:1], trainer(epochs=1))
    assert len(method.columns) == 3
    twin.load_state_dict(method.state_dict())
    for task in tasks:
        assert torch.equal(logits(twin, task), logits(method, task))
    with pytest.raises(RuntimeError, match="Missing key"):
        twin.load_state_dict({key: value for key, value in early.items() if "heads" not in key})
    assert len(twin.columns) == 3
    twin.load_state_dict(early)
    assert len(twin.columns) == 2
    around = torch.nn.ModuleDict({"pnn": twin})
    around.load_state_dict({f"pnn.{key}": value for key, value in method.state_dict().items()})
    assert len(twin.columns) == 3
    twin.load_state_dict(early)
    with pytest.raises(RuntimeError, match="Missing key"):
        twin.load_state_dict({})
    learn(twin, tasks[:1], trainer(epochs=1))
    for task in tasks:
        assert torch.equal(logits(twin, task), logits(method, task))


def test_budget_columns_do_not_depend_on_when_tasks_are_known():
    tasks = toy_tasks(3)
    early = make(small_mlp(), columns="budget", budget_tasks=3)
    late = make(small_mlp(), [3], columns="budget", budget_tasks=3)
    for task in tasks:
        if task.index:
            late.net.add_task(3)
        for one in (early, late):
            one.learn(task, trainer())
    for task in tasks:
        assert torch.equal(logits(early, task), logits(late, task))


def test_a_fit_that_is_stopped_leaves_no_trace():
    tasks = toy_tasks(2)
    method = make(small_mlp(), (3, 3))
    method.learn(tasks[0], trainer())
    before = {key: value.clone() for key, value in method.state_dict().items()}

    def stop(moment):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        method.learn(tasks[1], Trainer(Regime(epochs=2), progress=stop))
    views = ("net.mean", "net.std", "net.pixels", "net.raw")
    assert all(torch.equal(value, before[key]) for key, value in method.state_dict().items() if key not in views)
    assert all(p.requires_grad for p in method.parameters())


@pytest.mark.parametrize("task", [3, -1])
def test_a_task_that_is_not_there(task):
    with pytest.raises(IndexError, match=f"no task {task}"):
        make(small_mlp())(torch.zeros(1, 1, 4, 4), task)


@pytest.mark.parametrize(("option", "value"), [("columns", "half"), ("budget_tasks", -1), ("expand", 0.0)])
def test_hyper_parameters_out_of_range(option, value):
    with pytest.raises(ValueError, match=f"{option} must be .* not {value!r}"):
        make(small_mlp(), **{option: value})
