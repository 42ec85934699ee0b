"""Residual networks: the papers' numbers of parameters, shapes of layers, and every block against plain operations."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dev import plain_cifar100
from hatrack import METHODS, NETWORKS, Network, Regime, Task, Trainer, evaluate
from hatrack.__main__ import main
from hatrack.experiments.record import Record
from hatrack.methods.method import Method
from hatrack.methods.parts.task_norms import TaskNorms
from hatrack.networks.resnet import AuthorsBlock, BasicBlock, Bottleneck, resnet18, resnet34, resnet50
from hatrack.seeds import seeded
from tests.helpers.toys import toy_tasks

CIFAR = [2] * 5 + [20] * 5  # classes of the sequence `cifar`: 110 in all
IMAGE = (3, 32, 32)


def count(module):
    """Return the number of parameters."""
    return sum(p.numel() for p in module.parameters())


def parts(trunk, kind):
    """Return the modules of a kind."""
    return [m for m in trunk.modules() if isinstance(m, kind)]


def network(trunk, classes=CIFAR, **changes):
    return Network(trunk, classes, torch.zeros(2, *IMAGE), **changes)


# Numbers of parameters


def test_resnet18_has_the_numbers_that_000_states():
    trunk = resnet18(IMAGE)
    assert len(parts(trunk, nn.Conv2d)) == 20
    assert len(parts(trunk, nn.BatchNorm2d)) == 20
    net = network(trunk)
    assert count(net) == 11_225_262
    assert count(net) + count(TaskNorms(net)) == 11_311_662  # ten sets of norms, the first the trunk's own


def expected_count(width, blocks, bottleneck):
    """Return the number of parameters of a trunk, added up layer by layer as the papers list them."""
    total, inputs = 3 * width * 9 + 2 * width, width
    for stage, number in enumerate(blocks):
        narrow = width * 2**stage
        outputs = 4 * narrow if bottleneck else narrow
        for block in range(number):
            if bottleneck:
                total += inputs * narrow + narrow * narrow * 9 + narrow * outputs + 2 * (narrow + narrow + outputs)
            else:
                total += inputs * narrow * 9 + narrow * narrow * 9 + 2 * (narrow + narrow)
            if not block and (stage or bottleneck):
                total += inputs * outputs + 2 * outputs
            inputs = outputs
    return total


@pytest.mark.parametrize(
    ("build", "blocks", "bottleneck", "convolutions", "cifar"),
    [(resnet18, (2, 2, 2, 2), False, 20, 11_225_262), (resnet34, (3, 4, 6, 3), False, 36, 21_333_422),
     (resnet50, (3, 4, 6, 3), True, 53, 23_725_742)],
)  # fmt: skip
def test_numbers_of_parameters_of_all_depths(build, blocks, bottleneck, convolutions, cifar):
    trunk = build(IMAGE)
    assert len(parts(trunk, nn.Conv2d)) == len(parts(trunk, nn.BatchNorm2d)) == convolutions
    assert count(trunk) == expected_count(64, blocks, bottleneck)
    assert count(trunk) + 110 * (trunk(torch.zeros(2, *IMAGE)).shape[1] + 1) == cifar
    assert count(build(IMAGE, width=8)) == expected_count(8, blocks, bottleneck)


def test_the_block_of_004_has_the_parameters_that_its_code_uses():
    trunk = resnet18(IMAGE, width=20, block="authors")
    assert count(network(trunk, [100] * 20, heads="shared")) == 496_680
    assert len(parts(trunk, nn.Conv2d)) == 1 + 8 + 3
    unused = 2 * 9 * (20**2 + 40**2 + 80**2 + 160**2)  # the second convolution of every block
    assert 496_680 + unused == 1_108_680


def test_the_listing_of_000_contradicts_its_numbers():
    """Read literally, every stage's second block has a shortcut of its own: 21 norms, and 14.2 or 11.4 million."""
    for kernel, expected in ((3, 14_186_798), (1, 11_401_518)):
        total, norms, inputs = 3 * 64 * 9 + 2 * 64, 1, 64
        for width in (64, 128, 256, 512):
            total += 9 * (inputs * width + 3 * width * width) + kernel**2 * width * width + 5 * 2 * width
            norms, inputs = norms + 5, width
        assert norms == 21
        assert total + 110 * 513 == expected


# Shapes


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50"])
def test_shapes_of_all_stages(name):
    trunk, x = NETWORKS[name](IMAGE, width=4).eval(), torch.randn(2, *IMAGE)
    wide = 4 if name == "resnet50" else 1
    sizes = []
    for part in trunk:
        x = part(x)
        sizes.append(tuple(x.shape[1:]))
    stages = [(4 * wide * 2**k, 32 // 2**k, 32 // 2**k) for k in range(4)]
    assert sizes == [(4, 32, 32), *stages, (32 * wide, 1, 1), (32 * wide,)]
    assert not parts(trunk, nn.MaxPool2d)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 8, 8), (2, 17, 40)])
def test_images_of_other_shapes(shape):
    assert resnet18(shape, width=2)(torch.randn(3, *shape)).shape == (3, 16)


@pytest.mark.parametrize(
    ("name", "first"), [("resnet18", [False, True, True, True]), ("resnet50", [True, True, True, True])]
)
def test_shortcuts_are_identities_where_shapes_agree(name, first):
    stages = list(NETWORKS[name](IMAGE, width=2))[1:5]
    for stage, projected in zip(stages, first, strict=True):
        kinds = [isinstance(block.shortcut, nn.Identity) for block in stage]
        assert kinds == [not projected, *[True] * (len(stage) - 1)]
        if projected:
            conv, norm = stage[0].shortcut
            assert (conv.kernel_size, conv.bias, type(norm)) == ((1, 1), None, nn.BatchNorm2d)


def test_no_convolution_has_a_bias():
    assert all(conv.bias is None for conv in parts(resnet50(IMAGE, width=2), nn.Conv2d))


# Blocks against plain operations


def normalise(x, norm):
    """Apply a batch norm in evaluation mode, written out."""
    mean, var = (t[:, None, None] for t in (norm.running_mean, norm.running_var))
    return (x - mean) / (var + norm.eps).sqrt() * norm.weight[:, None, None] + norm.bias[:, None, None]


def randomise_norms(block):
    """Return the block in double precision and evaluation mode, with random parameters and statistics of norms."""
    with seeded(0, "block"), torch.no_grad():
        for norm in parts(block, nn.BatchNorm2d):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            norm.weight.normal_()
            norm.bias.normal_()
    return block.double().eval()


@pytest.mark.parametrize(("inputs", "stride"), [(4, 1), (3, 1), (4, 2), (3, 2)])
@pytest.mark.parametrize("kind", [BasicBlock, Bottleneck, AuthorsBlock])
def test_blocks(kind, inputs, stride):
    width = 1 if kind is Bottleneck else 4
    block = randomise_norms(kind(inputs, width, stride, 0.5))
    x = torch.randn(2, inputs, 6, 6, dtype=torch.float64)
    before = x.clone()

    def conv(x, layer, padding=1, stride=1):
        return F.conv2d(x, layer.weight, None, stride, padding)

    same = inputs == 4 and stride == 1
    assert isinstance(block.shortcut, nn.Identity) == same
    if kind is AuthorsBlock:
        side = x if same else conv(x, block.shortcut, 0, stride)
        h = normalise(conv(x, block.conv, 1, stride).clamp(min=0), block.norm1)
        expected = normalise((h + side).clamp(min=0), block.norm2)
    else:
        side = x if same else normalise(conv(x, block.shortcut[0], 0, stride), block.shortcut[1])
        if kind is BasicBlock:
            h = normalise(conv(x, block.conv1, 1, stride), block.norm1).clamp(min=0)
            h = normalise(conv(h, block.conv2), block.norm2)
        else:
            h = normalise(conv(x, block.conv1, 0), block.norm1).clamp(min=0)
            h = normalise(conv(h, block.conv2, 1, stride), block.norm2).clamp(min=0)
            h = normalise(conv(h, block.conv3, 0), block.norm3)
        expected = (h + side).clamp(min=0)
    torch.testing.assert_close(block(x), expected)
    assert torch.equal(x, before), "a block must not change its input, which the shortcut uses"


@pytest.mark.parametrize(("options", "dropouts"), [({}, 8), ({"block": "authors"}, 8)])
def test_dropout(options, dropouts):
    shape, x = (3, 8, 8), torch.randn(4, 3, 8, 8)
    trunk = resnet18(shape, width=4, dropout=0.5, **options)
    assert [d.p for d in parts(trunk, nn.Dropout)] == [0.5] * dropouts
    assert not torch.equal(trunk.train()(x), trunk(x))
    assert torch.equal(trunk.eval()(x), trunk(x))
    plain = resnet18(shape, width=4, **options).train()
    assert torch.equal(plain(x), plain(x))


@pytest.mark.parametrize(
    ("name", "shape", "options", "message"),
    [
        ("resnet18", (784,), {}, r"images of at least 8x8 pixels, not \(784,\)"),
        ("resnet50", (3, 7, 32), {}, r"not \(3, 7, 32\)"),
        ("resnet34", IMAGE, {"width": 0}, "width must be at least 1, not 0"),
        ("resnet18", IMAGE, {"dropout": 1.0}, "dropout must be at most 0.99, not 1.0"),
        ("resnet18", IMAGE, {"block": "mine"}, "block must be one of 'standard', 'authors', not 'mine'"),
    ],
)
def test_invalid_shapes_and_options(name, shape, options, message):
    with pytest.raises(ValueError, match=message):
        NETWORKS[name](shape, **options)


# In use


@pytest.mark.parametrize("block", ["standard", "authors"])
def test_a_resnet_learns(block):
    (task,) = toy_tasks(1, shape=(3, 8, 8), train=120)
    with seeded(0, "weights"):
        trunk = resnet18(task.shape, width=4, block=block)
    method = METHODS["sgd"](Network(trunk, [3], task.train.inputs(torch.arange(2))))
    method.learn(task, Trainer(Regime(epochs=6, batch=8, lr=0.1)))
    assert evaluate(method, task.test).accuracy > 0.9


def test_options_on_the_command_line(tmp_path):
    draw = np.random.RandomState(0)
    arrays = {f"x_{part}": draw.randint(0, 256, (8, 8, 8, 3), dtype=np.uint8) for part in ("train", "test")}
    np.savez(tmp_path / "noise.npz", **arrays, y_train=np.arange(8) % 2, y_test=np.arange(8) % 2)
    (tmp_path / "tasks.toml").write_text('[[task]]\nname = "noise"\ndata = "noise.npz"\n')
    words = ["run", "own", "sgd", "--tasks", str(tmp_path / "tasks.toml"), "--out", str(tmp_path), "--epochs", "1"]
    assert main([*words, "--network", "resnet18", "--width", "2", "--block", "authors", "--dropout", "0.1"]) == 0
    (path,) = tmp_path.glob("*.json")
    assert Record.load(path).spec.network_options == {"width": 2, "dropout": 0.1, "block": "authors"}


def test_a_head_per_task_is_one_masked_head_of_all_classes():
    """Steps of the library on the network of 004 are those of a loop without it, whose one head masks other tasks."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (40, 32, 32, 3), dtype=np.uint8), np.arange(40) % 5
    tasks = [Task.from_arrays(t, f"t{t}", x, y, x[:10], y[:10], mean=0.0, std=1.0, valid=0.0) for t in (0, 1)]
    net, plain = Network(resnet18(IMAGE, width=20, block="authors"), tasks=tasks), plain_cifar100.network()
    for own, other in zip(net.trunk.parameters(), plain[:-1].parameters(), strict=True):
        other.data.copy_(own.data)
    for task in (0, 1):
        rows = slice(5 * task, 5 * task + 5)
        plain[-1].weight.data[rows] = net.heads[task].weight.data
        plain[-1].bias.data[rows] = net.heads[task].bias.data
    seen = []

    class Watched(Method):
        def loss(self, batch):
            found = super().loss(batch)
            seen.append((batch.x.clone(), batch.y.clone(), found.item()))
            return found

    regime = Regime(epochs=1, batch=10, lr=0.01, optimizer="momentum", momentum=0.8)
    method, fit = Watched(net), Trainer(regime, engine="eager")
    for task in tasks:
        method.learn(task, fit)
    assert len(seen) == 8

    def losses(momentum):
        copy, found = deepcopy(plain), []
        for step, (images, labels, _) in enumerate(seen):
            if step in (0, 4):  # a task begins
                optimizer = torch.optim.SGD(copy.parameters(), lr=0.01, momentum=momentum)
            optimizer.zero_grad()
            loss = F.cross_entropy(plain_cifar100.masked(copy(images), step // 4), labels + 5 * (step // 4))
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    first = [loss for _, _, loss in seen[:5]]  # later on, rounding flips a ReLU, and the two part
    assert losses(0.8)[:5] == pytest.approx(first, rel=1e-5)
    assert losses(0.5)[:5] != pytest.approx(first, rel=1e-3)
