"""Trunks, heads, initial weights, frozen parts and seeds."""

import copy
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hatrack import HAT, METHODS, NETWORKS, Method, Network, Regime, Run, Task, Trainer, evaluate
from hatrack.experiments.build import build
from hatrack.networks.initial_weights import initialise
from hatrack.seeds import derive, generator, seeded
from tests.helpers.counting import CIFAR, MIXTURE, count
from tests.helpers.toys import toy_tasks


def make(name, shape, classes, options=None, **changes):
    return Network(NETWORKS[name](shape, **(options or {})), classes, torch.zeros(2, *shape), **changes)


def small(classes=(3, 2, 4), **changes):
    """A small network with the same trunk every time."""
    with seeded(0, "trunk"):
        trunk = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU())
    return Network(trunk, classes, torch.zeros(2, 1, 4, 4), **changes)


# Parameter counts (worked out in FACTS 1.3 and 3)


def test_alexnet_on_the_mixture():
    net = make("alexnet", (3, 32, 32), MIXTURE)
    assert count(net.trunk) == 6_503_872
    assert count(net) == 7_104_229
    assert count(HAT(net)) == 7_140_581


def test_alexnet_on_cifar():
    assert count(make("alexnet", (3, 32, 32), CIFAR)) == 6_729_262


def test_hats_mlp_on_permuted_mnist():
    assert count(HAT(make("mlp", (1, 28, 28), [10] * 10))) == 5_812_100


def test_hats_mlp_on_split_mnist():
    assert count(HAT(make("mlp", (1, 28, 28), [5] * 2))) == 5_600_010


@pytest.mark.parametrize(
    ("classes", "heads", "widths", "expected"),
    [([10] * 10, "multi", (800,) * 3, 1_989_700), ([5] * 2, "multi", (800,) * 3, 1_917_610),
     ([10] * 20, "shared", (256, 256), 269_322), ([10] * 20, "shared", (100, 100), 89_610)],
)  # fmt: skip
def test_the_mlp_of_the_baselines_and_of_004(classes, heads, widths, expected):
    assert count(make("mlp", (1, 28, 28), classes, {"widths": widths}, heads=heads)) == expected


def test_cnn_of_002():
    assert count(make("cnn", (1, 28, 28), [10] * 5, heads="shared")) == 13_906_570


def test_dropout_is_where_the_papers_have_it():
    def rates(trunk):
        return [(m.p if isinstance(m, nn.Dropout) else type(m).__name__) for m in trunk]

    block = ["Conv2d", "ReLU"]
    wide = ["Linear", "ReLU", 0.5]
    assert rates(NETWORKS["alexnet"]((3, 32, 32))) == [
        *block, 0.2, "MaxPool2d", *block, 0.2, "MaxPool2d", *block, 0.5, "MaxPool2d", "Flatten", *wide, *wide
    ]  # fmt: skip
    assert rates(NETWORKS["mlp"]((1, 28, 28))) == ["Flatten", 0.2, *wide, *wide]
    assert rates(NETWORKS["cnn"]((1, 28, 28))) == [0.2, *block, "MaxPool2d", "Flatten", *wide, *wide]
    assert rates(NETWORKS["mlp"]((7,), widths=(4,), dropout=0.0, input_dropout=0.0)) == ["Flatten", "Linear", "ReLU"]


@pytest.mark.parametrize(
    ("name", "shape", "options", "message"),
    [
        ("mlp", (4,), {"widths": ()}, "widths"),
        ("mlp", (4,), {"widths": (5, 0)}, "widths must be at least 1, not 0"),
        ("mlp", (4,), {"dropout": 1.0}, "dropout must be at most 0.99, not 1.0"),
        ("mlp", (4,), {"input_dropout": -0.1}, "input_dropout must be at least 0, not -0.1"),
        ("alexnet", (3, 8, 8), {}, r"22x22 pixels .*not higher than wide, not \(3, 8, 8\)"),
        ("alexnet", (784,), {}, r"not \(784,\)"),
        ("alexnet", (3, 64, 22), {}, r"not \(3, 64, 22\)"),
        ("cnn", (784,), {}, r"not.* \(784,\)"),
        ("cnn", (1, 1, 28), {}, r"not.* \(1, 1, 28\)"),
    ],
)
def test_networks_refuse_what_they_cannot_do(name, shape, options, message):
    with pytest.raises(ValueError, match=message):
        NETWORKS[name](shape, **options)


# Heads


def test_a_head_per_task():
    net = small()
    x = torch.randn(5, 1, 4, 4)
    assert [net(x, k).shape for k in range(3)] == [(5, 3), (5, 2), (5, 4)]
    features = net.trunk(x)
    for k in range(3):
        expected = features @ net.heads[k].weight.T + net.heads[k].bias
        torch.testing.assert_close(net(x, k), expected)


def test_a_shared_head():
    net = small([3, 2, 3], heads="shared")
    x = torch.randn(5, 1, 4, 4)
    assert len(net.heads) == 1
    assert torch.equal(net(x, 0), net(x, 2))
    assert torch.equal(net(x, 0), net(x, torch.tensor([0, 1, 2, 1, 0])))
    assert net(x, 1).shape == (5, 3)


def test_a_shared_head_too_small_for_a_task():
    net = small([3, 2], heads="shared")
    with pytest.raises(ValueError, match="3 outputs, too few for 4 classes"):
        net.add_task(4)
    assert net.classes == [3, 2]  # a task that was refused is not there
    assert net.add_task(3) == 2


@pytest.mark.parametrize("classes", [0, -1, 2.5])
def test_a_task_needs_classes(classes):
    net = small()
    with pytest.raises(ValueError, match=str(classes)):
        net.add_task(classes)
    assert net.classes == [3, 2, 4]
    assert len(net.heads) == 3


@pytest.mark.parametrize("heads", ["multi", "shared"])
@pytest.mark.parametrize("task", [3, -1])
def test_a_task_that_is_not_there(heads, task):
    with pytest.raises(IndexError, match=rf"no task {task}.*add_task"):
        small([3, 2, 3], heads=heads)(torch.zeros(1, 1, 4, 4), task)


@pytest.mark.parametrize("init", ["default", "xavier"])
def test_a_task_added_later_has_the_same_head(init):
    at_once, later = small(init=init), small([3], init=init)
    torch.rand(100)  # what others draw in between does not matter
    assert later.add_task(2) == 1
    assert later.add_task(4) == 2
    assert later.classes == at_once.classes
    for (name, a), (_, b) in zip(at_once.state_dict().items(), later.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_heads_start_from_different_weights():
    net, other = small([3, 3, 3]), small([3, 3, 3], seed=1)
    weights = [head.weight for head in [*net.heads, *other.heads]]
    assert not any(torch.equal(a, b) for k, a in enumerate(weights) for b in weights[:k])


def test_a_task_added_later_leaves_the_logits_of_others_alone():
    net, x = small([3]), torch.randn(7, 1, 4, 4)
    before = net(x, 0)
    net.add_task(9)
    assert torch.equal(net(x, 0), before)


def test_tasks_mixed_in_a_batch():
    net, x = small().double(), torch.randn(9, 1, 4, 4, dtype=torch.float64)
    task = torch.tensor([2, 0, 1, 1, 2, 0, 0, 1, 2])
    mixed = net(x, task)
    assert mixed.shape == (9, 4)
    assert mixed.isfinite().all()
    for n, k in enumerate(task.tolist()):
        own = net.classes[k]
        torch.testing.assert_close(mixed[n, :own], net(x[n : n + 1], k)[0])
        assert (mixed[n, own:] <= torch.finfo(torch.float64).min / 2).all()


def test_the_loss_of_mixed_tasks_is_the_mean_of_their_losses():
    net, x = small(), torch.randn(6, 1, 4, 4)
    task, y = torch.tensor([0, 1, 2, 0, 1, 2]), torch.tensor([2, 1, 3, 0, 0, 1])
    loss = F.cross_entropy(net(x, task), y)
    one = [F.cross_entropy(net(x[n : n + 1], int(task[n])), y[n : n + 1]) for n in range(6)]
    torch.testing.assert_close(loss, torch.stack(one).mean())
    loss.backward()
    mixed = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    torch.stack(one).mean().backward()
    for a, p in zip(mixed, net.parameters(), strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, p.grad)


@pytest.mark.parametrize(
    ("trunk", "got"),
    [
        (nn.Identity(), r"\(2, 1, 4, 4\)"),
        (nn.Flatten(0), r"\(32,\)"),
        (
            nn.Sequential(nn.Flatten(2), nn.Flatten(0, 1), nn.Linear(16, 5), nn.Flatten(0), nn.Unflatten(0, (5, 2))),
            r"\(5, 2\)",
        ),
        (nn.Sequential(nn.Flatten(), nn.LSTM(16, 3)), "tuple"),
    ],
)
def test_a_trunk_of_the_wrong_shape(trunk, got):
    with pytest.raises(ValueError, match=rf"\(batch, features\), not {got}"):
        Network(trunk, [3], torch.zeros(2, 1, 4, 4))


def test_wrong_words():
    with pytest.raises(ValueError, match="heads must be 'multi', 'shared' or 'class', not 'many'"):
        small(heads="many")
    with pytest.raises(ValueError, match="init must be 'default' or 'xavier', not 'kaiming'"):
        small(init="kaiming")


def test_making_a_network_leaves_the_trunk_as_it_was():
    for mode in (True, False):
        trunk = normed().train(mode)
        before = copy.deepcopy(trunk.state_dict())
        Network(trunk, [3], torch.randn(2, 1, 4, 4))
        assert {m.training for m in trunk.modules()} == {mode}
        for name, value in trunk.state_dict().items():
            assert torch.equal(value, before[name]), name


# Initial weights


@pytest.mark.parametrize(("layer", "inputs", "outputs"), [(nn.Linear(300, 200), 300, 200), (nn.Conv2d(20, 30, 3), 180, 270)])
def test_initial_weights(layer, inputs, outputs):
    # PyTorch: U(+-1/sqrt(inputs)) for weights and biases; Xavier: U(+-sqrt(6 / (inputs + outputs))) and no bias
    for how, bound in (("default", inputs**-0.5), ("xavier", math.sqrt(6 / (inputs + outputs)))):
        initialise(layer, how)
        assert 0.98 * bound < layer.weight.abs().max().item() <= bound
        assert layer.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03)
    assert not layer.bias.any()


def test_xavier_for_all_of_a_run():
    spec = Run("smnist", "sgd", init="xavier", benchmark_options={"data": "sample"}, network_options={"widths": (30,)})
    net = build(spec)[1].net
    for layer, inputs, outputs in ((net.trunk[2], 784, 30), (net.heads[0], 30, 5), (net.heads[1], 30, 5)):
        bound = math.sqrt(6 / (inputs + outputs))
        assert 0.9 * bound < layer.weight.abs().max().item() <= bound
        assert not layer.bias.any()


# Frozen parts


def normed():
    """A trunk with batch norms, in a part that is frozen and in one that is not."""
    with seeded(0, "trunk"):
        first = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU())
        return nn.Sequential(first, nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())


@pytest.mark.parametrize(
    ("method", "pattern"),
    [
        ("sgd", "0"),
        ("sgd", "0.*"),
        ("sgd", "0.1, 0.2"),
        ("sgd", "0.[12]"),
        ("frozen", "0"),
        ("lora", "0"),
        ("joint", "0"),
        ("independent", "0"),
    ],
)
def test_a_frozen_part_keeps_every_bit(method, pattern):
    net = Network(normed(), [3, 3], torch.zeros(2, 1, 4, 4), freeze=pattern)
    learner = METHODS[method](net)
    before = copy.deepcopy(learner.state_dict())
    fit = Trainer(Regime(epochs=2, batch=16, optimizer="adamw", weight_decay=0.1, schedule="constant"))
    for task in toy_tasks(2):
        learner.learn(task, fit)
    moved = {name for name, value in learner.state_dict().items() if not torch.equal(value, before[name])}
    trunk = r"(net\.trunk|trunks\.\d)"
    assert [name for name in moved if re.match(rf"{trunk}\.1\.weight", name)]  # the rest does learn
    assert [name for name in moved if re.match(rf"{trunk}\.2\.running_mean", name)]
    assert not [name for name in moved if re.match(rf"{trunk}\.0\.", name)]


def test_frozen_parts_stay_in_evaluation_mode():
    net = Network(normed(), [3], torch.zeros(2, 1, 4, 4), freeze="0")
    method = METHODS["sgd"](net)
    for mode in (True, False, True):
        method.train(mode)
        assert [m.training for m in net.trunk[0].modules()] == [False] * 5
        assert net.trunk[2].training is mode


def test_freezing_everything_leaves_the_heads():
    class Trunk(nn.Module):  # with dropout of its own, outside of any module
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 8)

        def forward(self, x):
            return F.dropout(self.layer(x.flatten(1)), 0.5, self.training)

    net = Network(Trunk(), [3], torch.zeros(2, 1, 4, 4), freeze="*").train()
    assert {name for name, p in net.named_parameters() if p.requires_grad} == {"heads.0.weight", "heads.0.bias"}
    x = torch.randn(4, 1, 4, 4)
    assert torch.equal(net(x, 0), net(x, 0))


def test_freezing_a_batch_norm_without_parameters():
    trunk = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16, affine=False), nn.Linear(16, 8))
    net = Network(trunk, [3], torch.zeros(2, 1, 4, 4), freeze="1").train()
    net(torch.randn(8, 1, 4, 4), 0)
    assert torch.equal(trunk[1].running_mean, torch.zeros(16))


@pytest.mark.parametrize("pattern", ["nothing", "0, nothing", "heads*", "10"])
def test_a_pattern_that_matches_nothing(pattern):
    with pytest.raises(ValueError, match=rf"freeze='{pattern.split(', ')[-1].replace('*', '[*]')}'.*parts are: 0, 1, 2, 3"):
        Network(normed(), [3], torch.zeros(2, 1, 4, 4), freeze=pattern)


# Seeds


def spec(seed, network="mlp", **options):
    return Run("smnist", "hat", seed, network=network, benchmark_options={"data": "sample"}, network_options=options)


def same(a, b):
    return [torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True)]


def test_a_seed_decides_the_weights():
    one, again, other = (build(spec(seed, widths=(20, 10)))[1] for seed in (1, 1, 2))
    assert all(same(one, again))
    assert not any(same(one, other))


def test_methods_at_one_seed_start_from_the_same_weights():
    nets = [
        build(Run("smnist", m, 4, benchmark_options={"data": "sample"}, network_options={"widths": (9,)}))[1]
        for m in METHODS
    ]
    for other in nets[1:]:
        assert all(same(nets[0].net, other.net))


def test_dropout_does_not_change_the_initial_weights():
    for network in ("mlp", "alexnet"):
        with_, without = build(spec(0, network))[1], build(spec(0, network, dropout=0.0))[1]
        assert all(same(with_, without)), network


def test_building_leaves_torchs_generator_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    net = build(spec(3, widths=(8,)))[1].net
    small().add_task(4)
    net.add_task(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_training_leaves_torchs_generator_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    trunk = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 8))
    torch.set_rng_state(before)
    METHODS["sgd"](Network(trunk, [3], torch.zeros(2, 1, 4, 4))).learn(toy_tasks(1)[0], Trainer(Regime(epochs=1)))
    assert torch.equal(torch.get_rng_state(), before)


def test_derived_seeds():
    seeds = [derive(s, *names) for s in range(20) for names in ((), ("a",), ("a", 0), ("a", 1), ("b",), ("a", "0"))]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= s < 2**63 for s in seeds)
    # printf "(0, 'weights')" | sha256sum begins with 8ee1db1599294ff2: f24f299915dbe18e in the other order, halved
    assert derive(0, "weights") == 0xF24F299915DBE18E // 2
    assert torch.equal(torch.rand(3, generator=generator(7, "x")), torch.rand(3, generator=generator(7, "x")))


def test_seeds_of_numpy_are_the_same_seeds():
    assert derive(np.int64(1), "task", np.int64(2)) == derive(1, "task", 2)


def test_seeded_restores_the_generator_after_an_error():
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError), seeded(0, "x"):
        torch.rand(3) @ torch.rand(2)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_can_t_work_is_refused_at_once():
    trunk, example = nn.Sequential(nn.Flatten(), nn.Linear(16, 8)), torch.rand(2, 1, 4, 4)
    with pytest.raises(ValueError, match="needs the classes of the first task"):
        Network(trunk, [], example, heads="shared")


def test_another_precision_than_that_of_the_images_is_one_line():
    trunk = nn.Sequential(nn.Flatten(), nn.Linear(16, 4)).double()
    with pytest.raises(ValueError, match="the example: images are float32, but the trunk's weights float64"):
        Network(trunk, [2], torch.zeros(2, 1, 4, 4))
    task = toy_tasks(1, shape=(1, 4, 4))[0]
    method = Method(Network(trunk, [task.classes], torch.zeros(2, 1, 4, 4, dtype=torch.float64)))
    with pytest.raises(ValueError, match=r"images are float32, but the trunk's weights float64; trunk\.float\(\)"):
        method.learn(task, Trainer(Regime(epochs=1)))
    learned = Method(Network(trunk.float(), [task.classes], torch.zeros(2, 1, 4, 4)))
    with pytest.raises(ValueError, match=r"images are float64, but the trunk's weights float32; images\.float\(\)"):
        learned(torch.zeros(2, 1, 4, 4, dtype=torch.float64), 0)


def test_a_trunk_may_change_the_precision_by_itself():
    class ExpandableLayer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 4).double()

        def forward(self, x):
            return self.layer(x.flatten(1).double()).float()

    task = toy_tasks(1, shape=(1, 4, 4))[0]
    method = Method(Network(ExpandableLayer(), [task.classes], torch.zeros(2, 1, 4, 4)))
    method.learn(task, Trainer(Regime(epochs=1)))
    assert method(task.test.inputs(torch.arange(3)), 0).isfinite().all()


def test_numbers_may_be_numpy_s_or_torch_s():
    tasks = toy_tasks(2)
    net = Network(nn.Sequential(nn.Flatten(), nn.Linear(16, 8)), np.array([3, 3]), tasks[0].train.inputs(torch.arange(2)))
    method = Method(net)
    for task in tasks:
        method.learn(task, Trainer(Regime(epochs=1)))
    x = tasks[0].test.inputs(torch.arange(5))
    for number in (np.int64(1), torch.tensor(1), np.array(1)):
        assert torch.equal(method(x, number), method(x, 1))
        assert torch.equal(method.predict(x, number), method.predict(x, 1))
    with pytest.raises(ValueError, match="by its number, or a tensor of them, one per image, not 'a'"):
        method.predict(x, "a")
    with pytest.raises(TypeError, match=r"missing.*'task'"):
        method(x)


@pytest.mark.parametrize(
    ("classes", "message"),
    [(5, r"such as \[5\], not 5"), ([2.5], "a whole number, not 2.5"), ([0], "at least one class.*, not 0")],
)
def test_classes_are_a_list_of_whole_numbers(classes, message):
    with pytest.raises(ValueError, match=message):
        Network(nn.Flatten(), classes, torch.zeros(2, 4))


def test_the_usual_slips_are_answered_in_words():
    task = toy_tasks(1)[0]
    trunk = nn.Sequential(nn.Flatten(), nn.Linear(16, 8))
    method = HAT(Network(trunk, [3], task.train.inputs(torch.arange(2))))
    with pytest.raises(ValueError, match=r"made of a Network, such as .*, not Sequential"):
        HAT(trunk)
    with pytest.raises(ValueError, match=r"a Trainer takes a Regime, such as .*, not 3"):
        Trainer(3)
    for wrong in (Regime(), None, 3):
        with pytest.raises(ValueError, match="learn takes a Task and a Trainer"):
            method.learn(task, wrong)
    with pytest.raises(ValueError, match="learn takes a Task and a Trainer"):
        method.learn(task.train, Trainer())
    with pytest.raises(ValueError, match="the name of a task is text, not 2024"):
        replace(task, name=2024)
    with pytest.raises(ValueError, match=r"its \.test"):
        evaluate(method, task)
    assert not method.history


# What a network is built from


def flat(features=48):
    with seeded(0, "trunk"):
        return nn.Sequential(nn.Flatten(), nn.Linear(features, 8), nn.ReLU())


PICTURES = np.random.RandomState(0).randint(0, 256, (5, 3, 4, 4), dtype=np.uint8)


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy, read_only], ids=["array", "tensor", "read-only"])
@pytest.mark.parametrize(
    ("raw", "shape"),
    [
        (PICTURES, (3, 4, 4)),
        (np.moveaxis(PICTURES, 1, 3), (3, 4, 4)),
        (PICTURES[:, :1], (1, 4, 4)),
        (PICTURES[:, 0, :, :, None], (1, 4, 4)),
        (PICTURES[:, 0], (1, 4, 4)),
        (PICTURES[:, 0, 0], (4,)),
    ],
)
def test_an_example_of_bytes_is_brought_into_form(raw, shape, kind):
    net = Network(flat(math.prod(shape)), [3], example=kind(np.ascontiguousarray(raw)))
    expected = torch.from_numpy(PICTURES).float()[:, : shape[0] if len(shape) == 3 else 1] / 255
    expected = expected if len(shape) == 3 else expected[:, 0, 0]
    assert net.example.dtype == torch.float32
    torch.testing.assert_close(net.example, expected)


def test_an_example_of_floats_is_taken_as_it_is():
    x = torch.randn(2, 5, 4, 3) * 300
    assert torch.equal(Network(flat(60), [3], x).example, x)
    assert torch.equal(Network(flat(60), [3], example=x.numpy()).example, x)


@pytest.mark.parametrize("build", [Network, Network.from_classifier])
def test_a_network_for_tasks(build):
    tasks = [toy_tasks(3, classes=count)[k] for k, count in enumerate((3, 5, 4))]
    net, same = (
        build(flat(16), tasks=[tasks[k] for k in (2, 0, 1)], seed=3),
        build(flat(16), [3, 5, 4], tasks[0].train.inputs(torch.arange(2)), seed=3),
    )
    assert net.classes == [3, 5, 4]
    assert torch.equal(net.example, same.example)
    for (name, a), (_, b) in zip(net.state_dict().items(), same.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    Method(net).learn(tasks[1], Trainer(Regime(epochs=1)))


def test_a_classifier_and_an_example_of_bytes():
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 10))
    net = Network.from_classifier(model, [3, 2], np.moveaxis(PICTURES, 1, 3))
    assert (net.features, tuple(net.example.shape)) == (8, (5, 3, 4, 4))
    assert isinstance(model[3], nn.Linear), "the classifier itself is not changed"


TOYS = toy_tasks(2)


@pytest.mark.parametrize("build", [Network, Network.from_classifier])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "tasks.*classes and an example"),
        ({"classes": [3]}, "tasks.*classes and an example"),
        ({"example": torch.zeros(2, 1, 4, 4)}, "tasks.*classes and an example"),
        ({"tasks": TOYS, "classes": [3, 3]}, "not both"),
        ({"tasks": TOYS, "example": torch.zeros(2, 1, 4, 4)}, "not both"),
        ({"tasks": []}, r"list of one Task or more, not \[\]"),
        ({"tasks": TOYS[0]}, r"list of one Task or more, not Task\(0"),
        ({"tasks": [3, 3]}, r"list of one Task or more, not \[3, 3\]"),
        ({"tasks": [TOYS[1]]}, r"0 to 0, not \[1\]"),
        ({"tasks": [TOYS[0], TOYS[0]]}, r"0 to 1, not \[0, 0\]"),
        ({"tasks": [TOYS[0], toy_tasks(2, shape=(1, 2, 8))[1]]}, r"'toy 1'.*\(1, 2, 8\).*'toy 0'.*\(1, 4, 4\)"),
        ({"classes": 3, "example": torch.zeros(2, 1, 4, 4)}, r"such as \[3\]"),
        ({"classes": [3], "example": "a picture"}, "example must be images"),
        ({"classes": [3], "example": np.zeros((2, 1, 1, 4, 4), np.uint8)}, "2 to 4 dimensions, not 5"),
    ],
)
def test_what_a_network_cannot_be_built_from(build, given, message):
    with pytest.raises(ValueError, match=message) as error:
        build(flat(16), **given)
    assert "\n" not in str(error.value)


def test_a_network_in_one_line():
    net = Network(flat(16), [3, 2], torch.zeros(2, 1, 4, 4))
    assert repr(net) == "Network(Sequential, 181 parameters, images 1x4x4, 2 tasks: 3, 2 classes)"
    many = Network(flat(16), [3] * 20, torch.zeros(2, 16), heads="shared", init="xavier", seed=4, freeze="1")
    assert repr(many) == (
        "Network(Sequential, 163 parameters, vectors of 16, 20 tasks: 3, 3, 3, 3, 3, 3, 3, 3, ... classes, heads='shared', "
        "init='xavier', seed=4, 136 of them frozen)"
    )
    assert "5.58 M parameters" in repr(make("mlp", (1, 28, 28), [5]))
    assert "0 tasks)" in repr(Network(flat(16), [], torch.zeros(2, 16)))


def test_an_error_of_the_trunk_names_the_shape_of_the_example():
    """A norm raises a ValueError where other layers raise a RuntimeError."""
    with pytest.raises(ValueError, match=r"can't be run on an example of shape \(1, 4, 5\): expected 4D input"):
        Network(nn.Sequential(nn.BatchNorm2d(1), nn.Flatten()), [2], torch.rand(1, 4, 5))


# Units of raw images


def test_raw_images_in_the_units_of_a_task_with_a_scale():
    x, y = PICTURES.astype(np.float32), np.arange(5) % 2
    how = {"mean": 0.5, "std": 0.25, "valid": 0.0}
    floats, bytes_ = (
        Task.from_arrays(0, "f", x, y, x, y, scale=255, **how),
        Task.from_arrays(1, "b", x / 255, y, x / 255, y, **how),
    )
    net = Network(flat(), tasks=[floats, bytes_])
    for task in (floats, bytes_):
        net.set_preprocessing(task)
    torch.testing.assert_close(net.preprocess(torch.from_numpy(x), 0), floats.test.inputs(torch.arange(5)))
    torch.testing.assert_close(net.preprocess(torch.from_numpy(x), 0), net.preprocess(torch.from_numpy(PICTURES), 1))
    with pytest.raises(ValueError, match="bytes"):
        net.preprocess(torch.from_numpy(PICTURES), 0)
    with pytest.raises(ValueError, match="bytes"):
        net.preprocess(torch.from_numpy(PICTURES), torch.tensor([1, 1, 0, 1, 1]))
