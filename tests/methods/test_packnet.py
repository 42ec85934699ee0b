"""PackNet: what is pruned, who owns it, and its guarantee against attempts to break it."""

import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from hatrack import Diverged, Network, Regime, Trainer
from hatrack.methods.packnet import PackNet
from hatrack.methods.parts.vectors import pieces
from hatrack.networks.mlp import mlp
from hatrack.seeds import seeded
from tests.helpers.learning import learn, logits
from tests.helpers.toys import toy_tasks

pytestmark = pytest.mark.filterwarnings("ignore:task .* finds under 5% free")  # the networks are tiny

ADAMW = {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1, "keep_state": True}


class Residual(nn.Module):
    """Convolutions with a shortcut, norms with and without statistics, and a parameter of one dimension."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.second, self.group = nn.Conv2d(6, 6, 3, padding=1), nn.GroupNorm(2, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        x = x + torch.relu(self.group(self.second(x)))
        return x.mean((2, 3)) * self.scale


class Attention(nn.Module):
    """Rows of the image as a sequence, with learned positions."""

    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Linear(4, 8), nn.Parameter(torch.zeros(1, 4, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.layer(self.embed(x[:, 0]) + self.places).mean(1)


def make(tasks, *, widths=(24, 20), heads="multi", known=None, trunk=None, **options) -> PackNet:
    with seeded(0, "weights"):
        trunk = trunk() if trunk else mlp(tasks[0].shape, widths=widths, dropout=0.0, input_dropout=0.0)
    net = Network(trunk, [t.classes for t in tasks[:known]], tasks[0].train.inputs(torch.arange(2)), heads=heads)
    return PackNet(net, **options)


def short(**changes) -> Trainer:
    return Trainer(Regime(**{"epochs": 3, "batch": 16, "lr": 0.1, **changes}))


class Normed(nn.Module):
    """A layer whose weights are computed with unit columns."""

    def __init__(self):
        super().__init__()
        self.directions = nn.Parameter(torch.randn(16, 24))

    def forward(self, x):
        return torch.relu(x.flatten(1) @ (self.directions / self.directions.norm(dim=0)))


# What is pruned


@pytest.mark.parametrize("prune", [0.0, 0.3, 0.75])
def test_the_smallest_of_the_free_weights_are_pruned_per_layer(prune):
    method = make(toy_tasks(1), widths=(5, 4), prune=prune)
    draw = torch.Generator().manual_seed(0)
    method.owner.copy_(torch.randint(0, 3, method.owner.shape, generator=draw))
    weights = [p for p in method.net.trunk.parameters() if p.dim() == 2]
    before = [(w.detach().clone(), o.clone()) for w, o in zip(weights, pieces(method.owner, weights), strict=True)]
    method._prune(3)
    for (old, owner), weight, now in zip(before, weights, pieces(method.owner, weights), strict=True):
        free = sorted(
            (abs(old[i, j].item()), i, j) for i in range(len(old)) for j in range(old.shape[1]) if owner[i, j] == 0
        )
        pruned = {(i, j) for _, i, j in free[: round(prune * len(free))]}
        for i in range(len(old)):
            for j in range(old.shape[1]):
                if (i, j) in pruned:
                    assert (now[i, j], weight[i, j]) == (0, 0)
                else:
                    assert now[i, j] == (owner[i, j] if owner[i, j] else 3)
                    assert weight[i, j] == old[i, j]


def test_every_task_takes_its_share_and_pruned_weights_stay_zero():
    tasks = toy_tasks(3)
    method = make(tasks, prune=0.75)
    free = {name: method.net.get_parameter(name).numel() for name in method.packed}
    assert list(free) == ["trunk.1.weight", "trunk.3.weight"], "weights only, and a head per task is not shared"
    sizes = dict(free)
    for task in tasks:
        method.learn(task, short(**ADAMW))
        free = {name: round(0.75 * count) for name, count in free.items()}
        assert method.usage() == pytest.approx({name: 1 - free[name] / sizes[name] for name in free})
        weights = [method.net.get_parameter(name) for name in method.packed]
        for weight, owner in zip(weights, pieces(method.owner, weights), strict=True):
            assert torch.equal(weight == 0, owner == 0), "what is free is 0, and retraining moved what is not"


def test_biases_stop_after_the_first_task():
    tasks = toy_tasks(2)
    method = make(tasks)
    start = method.net.trunk[1].bias.detach().clone()
    method.learn(tasks[0], short(**ADAMW))
    first = method.net.trunk[1].bias.detach().clone()
    assert not torch.equal(start, first)
    method.learn(tasks[1], short(**ADAMW))
    assert torch.equal(first, method.net.trunk[1].bias)


def test_biases_of_its_own_for_every_task():
    tasks = toy_tasks(2)
    method = make(tasks, biases="task")
    learn(method, tasks, short())
    own = [pieces(method.biases[k], [method.net.trunk[1].bias, method.net.trunk[3].bias]) for k in range(2)]
    assert not torch.equal(own[0][0], own[1][0])
    x = tasks[1].test.inputs(torch.arange(30)).flatten(1)
    weights = [method.net.trunk[1].weight, method.net.trunk[3].weight]
    taken = [torch.where(o > 0, w, 0) for w, o in zip(weights, pieces(method.owner, weights), strict=True)]
    for layer in range(2):
        x = torch.relu(F.linear(x, taken[layer], own[1][layer]))
    assert torch.equal(method.net.heads[1](x), logits(method, tasks[1]))


def test_the_retraining_has_its_own_epochs_and_rate():
    tasks = toy_tasks(2)
    method = make(tasks, retrain=2, retrain_lr=0.25)
    fit = short(task_lr_decay=0.5, schedule="exponential", gamma=0.5)
    learn(method, tasks, fit)
    assert [[epoch.lr for epoch in fitted.epochs] for fitted in fit.fits] == [
        pytest.approx(rates) for rates in ([0.1, 0.05, 0.025], [0.025, 0.0125], [0.05, 0.025, 0.0125], [0.0125, 0.00625])
    ]


def test_without_retraining_statistics_are_those_of_the_pruned_network():
    tasks = toy_tasks(1)
    method = make(tasks, trunk=Residual, retrain=0)
    fit = short()
    method.learn(tasks[0], fit)
    assert len(fit.fits) == 1
    out = method.net.trunk.first(tasks[0].train.inputs(torch.arange(len(tasks[0].train))))
    torch.testing.assert_close(method.net.trunk.norm.running_mean, out.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)


# The promise


def unchanged(method, tasks, fit, order=None) -> None:
    after = {}
    for k in order or range(len(tasks)):
        method.learn(tasks[k], fit)
        for earlier, kept in after.items():
            assert torch.equal(kept, logits(method, tasks[earlier])), f"task {earlier} changed while {k} was learned"
        after[k] = logits(method, tasks[k])
    assert all(kept.std(0).min() > 0 for kept in after.values()), "constant logits would prove nothing"


@pytest.mark.parametrize("heads", ["multi", "shared"])
@pytest.mark.parametrize("biases", ["first", "task"])
@pytest.mark.parametrize("norms", ["task", "shared"])
def test_nothing_changes_in_a_network_with_norms_and_shortcuts(heads, biases, norms):
    tasks = toy_tasks(3)
    method = make(tasks, trunk=Residual, heads=heads, biases=biases, norms=norms, prune=0.3, retrain=2)
    assert set(method.packed) == {"trunk.first.weight", "trunk.second.weight"} | (
        {"heads.0.weight"} if heads == "shared" else set()
    )
    unchanged(method, tasks, short(**ADAMW))


def test_nothing_changes_in_a_transformer():
    tasks = toy_tasks(3)
    method = make(tasks, trunk=Attention, retrain=2)
    assert len(method.packed) == 6
    unchanged(method, tasks, short(**ADAMW))


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw"])
def test_a_shared_head_is_packed_as_well(optimizer):
    tasks = toy_tasks(3)
    method = make(tasks, heads="shared", retrain=2)
    unchanged(method, tasks, short(optimizer=optimizer, lr=0.01, keep_state=True, weight_decay=0.1))
    assert method.usage()["heads.0.weight"] == pytest.approx(1 - 0.75**3, abs=0.02)


def test_tasks_may_be_learned_in_any_order():
    tasks = toy_tasks(3)
    method = make(tasks)
    unchanged(method, tasks, short(), order=[2, 0, 1])
    assert method.turns.tolist() == [2, 3, 1]


@pytest.mark.parametrize("poison", [1e6, math.inf, math.nan])
def test_free_and_later_weights_do_not_matter_and_the_others_do(poison):
    tasks = toy_tasks(2)
    method = make(tasks)
    learn(method, tasks, short())
    before = logits(method, tasks[0])
    weights = [method.net.get_parameter(name) for name in method.packed]
    for weight, owner in zip(weights, pieces(method.owner, weights), strict=True):
        kept = weight.detach().clone()
        for strange in (0, 2):
            assert (owner == strange).any()
            weight.data = torch.where(owner == strange, poison, kept)
            assert torch.equal(before, logits(method, tasks[0]))
        weight.data = torch.where(owner == 1, kept + 1, kept)
        assert not torch.equal(before, logits(method, tasks[0]))
        weight.data = kept


def test_a_task_reads_what_earlier_ones_own():
    tasks = toy_tasks(2)
    method = make(tasks)
    learn(method, tasks, short())
    before, weight = logits(method, tasks[1]), method.net.trunk[3].weight
    weight.data = torch.where(pieces(method.owner, [method.net.trunk[1].weight, weight])[1] == 1, weight + 1, weight)
    assert not torch.equal(before, logits(method, tasks[1]))


def test_a_network_that_is_full_still_learns_its_head():
    tasks = toy_tasks(2)
    method = make(tasks, prune=0.0)
    unchanged(method, tasks, short())
    assert set(method.usage().values()) == {1.0}


def test_parts_that_the_user_froze_stay_whole():
    tasks = toy_tasks(2)
    trunk = mlp(tasks[0].shape, widths=(12, 12), dropout=0.0, input_dropout=0.0)
    method = PackNet(Network(trunk, [3, 3], torch.zeros(2, 1, 4, 4), freeze="1"))
    before = trunk[1].weight.detach().clone()
    learn(method, tasks, short())
    assert method.packed == ["trunk.3.weight"]
    assert torch.equal(before, trunk[1].weight)


def partly_frozen(tasks, ending):
    trunk = mlp(tasks[0].shape, widths=(12, 12), dropout=0.0, input_dropout=0.0)
    for name, parameter in trunk.named_parameters():
        parameter.requires_grad_(not name.endswith(ending))
    return Network(trunk, [3, 3], torch.zeros(2, 1, 4, 4))


def test_biases_that_the_first_task_alone_trains_are_told_where_no_weight_is_packed():
    tasks = toy_tasks(2)
    with pytest.warns(UserWarning, match=r"trunk\.1\.bias, trunk\.3\.bias: biases='task'") as caught:
        method = PackNet(partly_frozen(tasks, "weight"))
    assert [w.filename for w in caught] == [__file__]
    learn(method, tasks[:1], short())
    before = method.net.trunk[1].bias.clone()
    learn(method, tasks[1:], short())
    assert torch.equal(before, method.net.trunk[1].bias)


@pytest.mark.parametrize(("ending", "options"), [("weight", {"biases": "task"}), (("weight", "bias"), {}), ("bias", {})])
def test_packnet_says_nothing_where_later_tasks_train_something_or_all_is_frozen(ending, options):
    tasks = toy_tasks(2)
    net = partly_frozen(tasks, ending)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PackNet(net, **options)


def test_protection_survives_a_load_that_replaces_the_parameters():
    tasks = toy_tasks(2)
    method = make(tasks)
    method.learn(tasks[0], short())
    first = logits(method, tasks[0])
    method.load_state_dict({key: value.clone() for key, value in method.state_dict().items()}, assign=True)
    method.learn(tasks[1], short(**ADAMW))
    assert torch.equal(first, logits(method, tasks[0]))


# Giving back


def test_a_task_that_is_learned_again_frees_what_no_other_task_uses():
    tasks = toy_tasks(2)
    method = make(tasks)
    learn(method, tasks, short())
    shares, first = method.usage(), logits(method, tasks[0])
    method.learn(tasks[1], short())
    assert method.usage() == shares
    assert torch.equal(first, logits(method, tasks[0]))
    assert method.turns.tolist() == [1, 2]
    second = logits(method, tasks[1])
    method.learn(tasks[0], short())
    assert torch.equal(second, logits(method, tasks[1])), "it reads the weights that the first task had"
    assert min(method.usage().values()) > max(shares.values())


@pytest.mark.parametrize("options", [{}, {"biases": "task"}, {"trunk": Residual}])
def test_a_released_task_is_as_one_that_was_never_learned(options):
    tasks = toy_tasks(3)
    method = make(tasks, **options)
    learn(method, tasks[:2], short())
    shares, kept = method.usage(), [logits(method, task) for task in tasks[:2]]
    method.learn(tasks[2], short())
    method.release(2)
    assert method.usage() == shares
    assert all(torch.equal(old, logits(method, task)) for old, task in zip(kept, tasks, strict=False))
    fresh = make(tasks, **options)
    assert torch.equal(method.net.heads[2].weight, fresh.net.heads[2].weight)
    for own, other in zip(method.norms.of(2).values(), fresh.norms.of(2).values(), strict=True):
        assert torch.equal(own, other)
    with pytest.raises(ValueError, match="task 2 is not learned"):
        method.release(2)


def test_releasing_a_task_leaves_the_weights_that_a_later_one_reads():
    tasks = toy_tasks(3)
    method = make(tasks)
    learn(method, tasks[:2], short())
    shares, second = method.usage(), logits(method, tasks[1])
    method.release(0)
    assert method.usage() == shares
    assert torch.equal(second, logits(method, tasks[1]))
    method.learn(tasks[2], short())
    assert torch.equal(second, logits(method, tasks[1]))
    for task in (1, 2):
        method.release(task)
    assert set(method.usage().values()) == {0.0}, "with the last reader everything is free"
    method.learn(tasks[0], short(epochs=10))
    assert method.turns.tolist() == [1, 0, 0]


def test_a_retraining_that_fails_is_rolled_back():
    tasks = toy_tasks(2)
    method = make(tasks, retrain_lr=1e38)
    method.retrain = 0
    method.learn(tasks[0], short())
    method.retrain = 2
    before = {key: value.clone() for key, value in method.state_dict().items()}
    with pytest.raises(Diverged):
        method.learn(tasks[1], short(clip=0.0))
    assert all(torch.equal(before[key], value) for key, value in method.state_dict().items())
    assert method.freezes == []


@pytest.mark.parametrize(("option", "value"), [("prune", 1.0), ("retrain", -1), ("retrain_lr", 0.0), ("norms", "none")])
def test_hyper_parameters_out_of_range(option, value):
    with pytest.raises(ValueError, match=f"{option} must be .* not {value!r}"):
        make(toy_tasks(1), **{option: value})


def weight_normed(norm):
    return nn.Sequential(nn.Flatten(), norm(nn.Linear(16, 4)), nn.ReLU(), norm(nn.Linear(4, 24)), nn.ReLU())


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize(
    "trunk",
    [
        lambda: weight_normed(parametrizations.weight_norm),
        lambda: weight_normed(lambda layer: parametrizations.weight_norm(layer, dim=1)),
        lambda: weight_normed(nn.utils.weight_norm),
        Normed,
    ],
    ids=["rows", "columns", "the old function", "columns by hand"],
)
@pytest.mark.parametrize("retrain", [0, 2])
def test_no_row_whose_length_divides_is_pruned_whole(trunk, retrain):
    tasks = toy_tasks(3)
    method = make(tasks, trunk=trunk, prune=0.75, retrain=retrain)
    answers = []
    for task in tasks:
        method.learn(task, short())
        answers.append(logits(method, task))
        assert answers[-1].isfinite().all()
        assert (answers[-1].std(0) > 0).any()
    assert all(torch.equal(logits(method, task), then) for task, then in zip(tasks, answers, strict=True))
    method.release(2, erase=True)
    assert all(torch.equal(logits(method, task), then) for task, then in zip(tasks[:2], answers, strict=False))


def test_shared_norms_stay_as_the_first_task_leaves_them_without_retraining_too():
    tasks = toy_tasks(3)
    trunk = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.BatchNorm1d(12), nn.ReLU())
    net = Network(trunk, [3, 3, 3], tasks[0].train.inputs(torch.arange(2)))
    method = PackNet(net, norms="shared", retrain=0)
    fit = Trainer(Regime(epochs=3, batch=16, lr=0.1))
    method.learn(tasks[0], fit)
    before = logits(method, tasks[0])
    for task in tasks[1:]:
        method.learn(task, fit)
    assert torch.equal(before, logits(method, tasks[0]))
