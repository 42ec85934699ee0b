"""Units and dependency sets against values worked out by hand, known pitfalls of tracing, and HAT on traced networks."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from hatrack import HAT, METHODS, PMASK, Network, PackNet, Regime, Trainer
from hatrack.methods.parts.task_norms import own_tensors
from hatrack.seeds import seeded
from hatrack.tracing.dependencies import ALWAYS_ACTIVE, ALWAYS_ZERO, DependencySets
from hatrack.tracing.gates import Gate
from hatrack.tracing.trace import Trace
from hatrack.tracing.units import Units
from tests.helpers.learning import learn, logits
from tests.helpers.nets import (
    CHANNELS_FIRST,
    CHANNELS_LAST,
    Lambda,
    as_module,
    between_layers,
    check_units,
    input_dependencies,
)
from tests.helpers.toys import toy_tasks
from tests.helpers.tracing import FOLLOWED, UNTRACEABLE, trunk_around

EACH = [{0}, {1}, {2}, {3}]
ACTIVE = ["always active"]


@pytest.fixture(autouse=True)
def _seed():
    """Seed the global generator, so that the weights of a test do not depend on the tests before it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def images(*shape, count=5):
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(0))


# One operation between two layers: the dependency set of each input of the second layer


def written_in_place(x):
    y = torch.zeros_like(x)
    y[:, 1:] = x[:, :-1].relu()
    y[:, 0] += x[:, 3]
    y *= 2
    return y


def writing(change):
    """Return a module that changes a copy of its input in place."""

    def operation(x):
        y = x.clone()
        change(y)
        return y

    return as_module(operation)


def with_out(function):
    """Return a module that writes its result into an existing tensor, as `out=` does."""

    def operation(x):
        result = torch.empty_like(x)
        with torch.no_grad():
            function(x, result)
        return result

    return as_module(operation)


KINDS = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh,
    nn.Hardtanh, nn.Hardswish, nn.Softsign, nn.Tanhshrink, nn.Softshrink, nn.Hardshrink, nn.Dropout, nn.Dropout2d,
    nn.AlphaDropout, nn.Identity, nn.Sigmoid, nn.Hardsigmoid, nn.LogSigmoid, nn.Softplus,  # the last four are gated again
)  # fmt: skip
CHANNEL_BY_CHANNEL = {kind.__name__: kind() for kind in KINDS} | {
    "exp": as_module(torch.exp),
    "cos": as_module(torch.cos),
    "methods with f(0) != 0": as_module(lambda x: x.sigmoid() + x.exp()),
    "in place": nn.Sequential(as_module(lambda x: x.mul_(2)), nn.Dropout(inplace=True), nn.LeakyReLU(inplace=True)),
    "functions": as_module(lambda x: F.leaky_relu(torch.tanh(x), 0.1).abs().clamp_(min=0).sqrt() ** 3 / 2),
    "powers and signs": as_module(lambda x: x.square().neg().sin() * x.sign() - x.pow(3)),
    "swish written out": as_module(lambda x: x * torch.sigmoid(x)),
    "masks": as_module(lambda x: torch.where(x > 0, x, 0) + x * (x > 0) + x.masked_fill(x > 1, 0)),
    "another precision": as_module(lambda x: x.double().mul(2).float()),
    "power pool": nn.LPPool2d(2, 2),
    "max pool": nn.MaxPool2d(3, stride=2, padding=1),
    "max pool undone": as_module(lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)),
    "mean pool": nn.AvgPool2d(3, stride=2, padding=1),
    "adaptive mean pool": nn.AdaptiveAvgPool2d(3),
    "adaptive max pool": nn.AdaptiveMaxPool2d(3),
    "global pool": nn.AdaptiveAvgPool2d(1),
    "mean and largest": as_module(lambda x: x.mean((2, 3), keepdim=True) + x.amax((2, 3), keepdim=True)),
    "masks and norm": as_module(lambda x: x.var((2, 3), keepdim=True) + x.norm(dim=(2, 3), keepdim=True)),
    "running sum": as_module(lambda x: x.cumsum(2)),
    "zero padding": nn.ZeroPad2d(1),
    "reflection": nn.ReflectionPad2d(1),
    "replication": nn.ReplicationPad2d(1),
    "circular padding": nn.CircularPad2d(1),
    "nearest": nn.Upsample(scale_factor=2),
    "bilinear": nn.Upsample(scale_factor=2, mode="bilinear"),
    "bicubic": nn.Upsample(size=5, mode="bicubic"),
    "grid": as_module(lambda x: F.grid_sample(x, torch.zeros(len(x), 3, 3, 2), align_corners=False)),
    "unfold and fold": as_module(lambda x: F.fold(F.unfold(x, 2, stride=2), (8, 8), 2, stride=2)),
    "moved in space": as_module(lambda x: x.roll(1, 3).flip(2).rot90(1, (2, 3))),
    "copied": as_module(lambda x: torch.empty_like(x).copy_(x, True)),
    "mantissa": as_module(lambda x: torch.frexp(x)[0]),
    "divided by its norm": as_module(F.normalize),
    "local response": nn.LocalResponseNorm(2),
    "batch norm": nn.BatchNorm2d(4),
    "group norm": nn.GroupNorm(2, 4),
    "instance norm": nn.InstanceNorm2d(4, affine=True),
    "layer norm of all": nn.LayerNorm([4, 8, 8]),
    "layer norm of rows": nn.LayerNorm(8),
    "layer norm of channels": nn.Sequential(CHANNELS_LAST, nn.LayerNorm(4), CHANNELS_FIRST),
    "root mean square": nn.RMSNorm([4, 8, 8]),
    "norm behind norm": nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.GroupNorm(1, 4)),
}
NOT_ANALYSED = {  # the result is always active: more weights are frozen than necessary, which is safe
    "1 - x": as_module(lambda x: 1 - x),
    "threshold": nn.Threshold(0.1, 20),
    "clamped from 0.1": as_module(lambda x: x.clamp(min=0.1)),
    "sigmoid in place": as_module(lambda x: x.clone().sigmoid_()),
    "sigmoid elsewhere": with_out(lambda x, result: torch.sigmoid(x, out=result)),
    "joined elsewhere": with_out(lambda x, result: torch.cat([x[:, :2], x[:, 2:]], 1, out=result)),
    "constant padding": nn.ConstantPad2d(1, 1.0),
    "softmax": nn.Softmax(1),
    "sorted": as_module(lambda x: x.sort(1)[0]),
    "gathered by value": as_module(lambda x: x.gather(1, x.topk(4, 1).indices)),
    "ordered by value": as_module(lambda x: x[:, x[0].sum((1, 2)).argsort()]),
    "Fourier": as_module(lambda x: torch.fft.ifft(torch.fft.fft(x)).real.contiguous()),
    "whole numbers added": as_module(lambda x: x + (x > 100).long()),
    "written as complex numbers": writing(lambda y: torch.view_as_complex(y.view(*y.shape[:3], -1, 2)).add_(1)),
    "written as whole numbers": writing(lambda y: y.data.view(torch.int32)[..., 0].fill_(1 << 29)),
    "written in a list": writing(lambda y: torch._foreach_add_([y], 1.0)),
    "written by number": as_module(lambda x: torch.zeros_like(x).index_put((torch.arange(len(x)),), x)),
}
CROSSED = [{0, 3}, {1, 2}, {1, 2}, {0, 3}]
OTHERS = {  # the channels are moved, joined or left out
    "sum": (as_module(lambda x: x.sum(1, keepdim=True)), [{0, 1, 2, 3}]),
    "largest": (as_module(lambda x: x.max(1, keepdim=True)[0]), [{0, 1, 2, 3}]),
    "shortcut": (as_module(lambda x: x + x.flip(1)), CROSSED),
    "larger of two": (as_module(lambda x: torch.max(x, x.flip(1))), CROSSED),
    "one or the other": (as_module(lambda x: torch.where(x > 0, x, x.flip(1))), CROSSED),
    "product": (as_module(lambda x: x * (x + x.flip(1))), EACH),
    "products of channels": (as_module(lambda x: (x.flatten(2) @ x.flatten(2).mT)[..., None]), EACH),
    "quotient": (as_module(lambda x: x / (1 + x.flip(1).abs())), EACH),
    "concatenation": (as_module(lambda x: torch.cat([x, F.relu(x)], 1)), EACH + EACH),
    "concatenation with ones": (as_module(lambda x: torch.cat([x, torch.ones_like(x[:, :1])], 1)), EACH + ACTIVE),
    "concatenation with noughts": (as_module(lambda x: torch.cat([x.new_zeros(len(x), 1, 8, 8), x], 1)), [set(), *EACH]),
    "split and swapped": (as_module(lambda x: torch.cat(x.chunk(2, 1)[::-1], 1)), [{2}, {3}, {0}, {1}]),
    "part of a split": (as_module(lambda x: x.split([1, 3], 1)[1]), [{1}, {2}, {3}]),
    "gated half": (nn.GLU(1), [{0}, {1}]),
    "channel shuffle": (nn.ChannelShuffle(2), [{0}, {2}, {1}, {3}]),
    "shuffle by reshape": (
        as_module(lambda x: x.view(-1, 2, 2, 8, 8).transpose(1, 2).reshape(-1, 4, 8, 8)), [{0}, {2}, {1}, {3}],
    ),
    "rolled": (as_module(lambda x: x.roll(1, 1)), [{3}, {0}, {1}, {2}]),
    "taken by number": (as_module(lambda x: x[:, [2, 2, 0]]), [{2}, {2}, {0}]),
    "depth to space": (nn.PixelShuffle(2), [{0, 1, 2, 3}]),
    "space to depth": (nn.PixelUnshuffle(2), [{k // 4} for k in range(16)]),
    "patches": (as_module(lambda x: F.unfold(x, 2, stride=4).unflatten(2, (2, 2))), [{k // 4} for k in range(16)]),
    "shortcut with noughts": (as_module(lambda x: F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 1, 1))), [set(), *EACH, set()]),
    "written in place": (as_module(written_in_place), [{3}, {0}, {1}, {2}]),
    "places as channels": (as_module(lambda x: x.flatten(2).mT.reshape(-1, 64, 2, 2)), [{0, 1, 2, 3}] * 64),
    "flattened": (as_module(lambda x: x.flatten(1)[:, :, None, None]), [{k // 64} for k in range(256)]),
}  # fmt: skip
OPERATIONS = {
    **{name: (operation, EACH) for name, operation in CHANNEL_BY_CHANNEL.items()},
    **{name: (operation, ACTIVE * 4) for name, operation in NOT_ANALYSED.items()},
    **OTHERS,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_between_two_layers(name):
    operation, expected = OPERATIONS[name]
    units = check_units(between_layers(copy.deepcopy(operation), len(expected)), images(2, 8, 8))
    assert input_dependencies(units, "second") == expected
    assert input_dependencies(units, "first") == ACTIVE * 2, "images are always active"
    assert units.layers == {"first": slice(0, 4), "second": slice(4, 7)}, "none of these has units of its own"


# Layers of every kind


def test_two_linear_layers_by_hand():
    """The mask of a weight is the smaller of the values of the unit that it writes and of the unit that it reads."""
    units = check_units(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), images(2))
    masks = units.weight_masks(torch.tensor([0.1, 0.5, 0.9, 0.3, 0.7]))
    assert units.layers == {"0": slice(0, 3), "2": slice(3, 5)}
    torch.testing.assert_close(masks["0.weight"], torch.tensor([[0.1, 0.1], [0.5, 0.5], [0.9, 0.9]]))
    torch.testing.assert_close(masks["0.bias"], torch.tensor([0.1, 0.5, 0.9]))
    torch.testing.assert_close(masks["2.weight"], torch.tensor([[0.1, 0.3, 0.3], [0.1, 0.5, 0.7]]))
    torch.testing.assert_close(masks["2.bias"], torch.tensor([0.3, 0.7]))
    assert [units.members(set_id) for set_id in units.features.tolist()] == [[3], [4]]
    torch.testing.assert_close(units.feature_masks(torch.tensor([0.1, 0.5, 0.9, 0.3, 0.7])), torch.tensor([0.3, 0.7]))


with seeded(0, "layers"):
    LAYERS = {
        "1-d": (nn.Conv1d(2, 6, 3), nn.Conv1d(6, 4, 3, stride=2, padding=1, bias=False), (9,)),
        "2-d, dilated": (nn.Conv2d(2, 6, 3), nn.Conv2d(6, 4, 2, dilation=2, padding="same", padding_mode="reflect"), (6, 5)),
        "3-d": (nn.Conv3d(2, 6, 2), nn.Conv3d(6, 4, (1, 2, 2)), (4, 4, 4)),
        "groups": (nn.Conv2d(2, 6, 3, groups=2), nn.Conv2d(6, 4, 3, groups=2, padding=1), (6, 5)),
        "depthwise": (nn.Conv2d(2, 6, 3, groups=2), nn.Conv2d(6, 6, 3, groups=6, bias=False), (6, 5)),
        "depthwise with a multiplier": (nn.Conv2d(2, 6, 3), nn.Conv2d(6, 12, 3, groups=6), (6, 5)),
        "transposed 1-d": (nn.ConvTranspose1d(2, 6, 3, stride=2), nn.ConvTranspose1d(6, 4, 3, padding=1, dilation=2), (4,)),
        "transposed": (
            nn.ConvTranspose2d(2, 6, 3),
            nn.ConvTranspose2d(6, 4, 3, stride=2, output_padding=1, bias=False),
            (4, 3),
        ),
        "transposed, groups": (nn.ConvTranspose2d(2, 6, 3, groups=2), nn.ConvTranspose2d(6, 9, 3, groups=3), (4, 3)),
        "transposed 3-d, groups": (nn.ConvTranspose3d(2, 4, 2), nn.ConvTranspose3d(4, 4, 2, groups=2), (2, 2, 2)),
        "to and fro": (nn.Conv2d(2, 6, 3, stride=2), nn.ConvTranspose2d(6, 3, 3, stride=2, groups=3), (9, 9)),
    }


def expected_mask(layer, inputs, outputs):
    """Return the smaller of the values of a weight's input and output, computed weight by weight."""
    table = torch.zeros_like(layer.weight)
    per_input, per_output = layer.in_channels // layer.groups, layer.out_channels // layer.groups
    for a in range(table.shape[0]):
        for b in range(table.shape[1]):
            if layer.transposed:
                source, target = a, (a // per_input) * per_output + b
            else:
                source, target = (a // per_output) * per_input + b, a
            table[a, b] = min(inputs[source], outputs[target])
    return table


@pytest.mark.parametrize("name", LAYERS)
def test_convolutions_of_every_kind(name):
    first, second, size = LAYERS[name]
    trunk = copy.deepcopy(nn.Sequential(first, nn.ReLU(), second, nn.Tanh(), nn.Flatten()))
    units = check_units(trunk, images(2, *size))
    values = torch.rand(units.count)
    masks, middle = units.weight_masks(values), first.out_channels
    assert units.count == middle + second.out_channels
    torch.testing.assert_close(masks["0.weight"], expected_mask(first, [1.0, 1.0], values[:middle]))
    torch.testing.assert_close(masks["0.bias"], values[:middle])
    torch.testing.assert_close(masks["2.weight"], expected_mask(second, values[:middle], values[middle:]))
    if second.bias is not None:
        torch.testing.assert_close(masks["2.bias"], values[middle:])


def chosen_by_number(own, x):
    """A trunk that reads the channels that were largest in training: their numbers are a buffer."""
    h = own.first(x).relu()
    if own.training:
        own.sizes.lerp_(h.detach().mean(0), 0.5)
        own.chosen.copy_(own.sizes.topk(3).indices)
    return own.second(h[:, own.chosen])


def chosen_by_size(own, x):
    """The same, but only their sizes are a buffer."""
    h = own.first(x).relu()
    if own.training:
        own.sizes.lerp_(h.detach().mean(0), 0.5)
    return own.second(h[:, own.sizes.argsort()[-3:]])


def chosen_anew(own, x):
    """The same by a new tensor every time; that of the first pass was written as often as the buffer, with its values."""
    h = own.first(x).relu()
    if own.training:
        own.chosen = torch.zeros(3, dtype=torch.int64).copy_(own.sizes.topk(3).indices.sort().values)
        own.sizes.lerp_(h.detach().mean(0), 0.5)
    return own.second(h[:, own.chosen])


@pytest.mark.parametrize("forward", [chosen_by_number, chosen_by_size, chosen_anew])
def test_channels_that_are_chosen_by_what_training_writes(forward):
    """After training, other channels are read than on the example."""
    buffers = {"sizes": nn.Buffer(torch.linspace(0, 1, 8)), "chosen": nn.Buffer(torch.tensor([5, 6, 7]))}
    trunk = Lambda(forward, first=nn.Linear(4, 8), second=nn.Linear(3, 5), **buffers)
    units, x = Units(trunk, images(4)[:2]), images(4)
    trunk.eval().chosen.copy_(torch.tensor([0, 1, 2]))
    trunk.sizes.copy_(trunk.sizes.flip(0))
    gates = torch.arange(units.count) < 5  # of the first layer 0 to 4
    gates[units.layers["second"]] = True
    masks = units.weight_masks(gates)
    assert not masks["first.weight"][5:].any()
    changed = {name: torch.where(masks[name], p.detach(), p.detach() + 3) for name, p in trunk.named_parameters()}
    with torch.no_grad():
        assert torch.equal(units.run(x, gates), units.run(x, gates, changed))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: torch.view_as_complex(x.unflatten(1, (-1, 2))).angle(),
        lambda x: torch.view_as_complex(x.unflatten(1, (-1, 2))).abs(),
        lambda x: x.view(torch.int32).float() / 2**30,
    ],
    ids=["angle", "absolute value", "bits"],
)
def test_zeros_of_the_example_behind_complex_numbers_or_bits(read):
    """They are zero for these two inputs, not for all."""
    example = -torch.ones(2, 3)
    first = nn.Linear(3, 8)
    nn.init.constant_(first.weight, 1.0)
    nn.init.zeros_(first.bias)
    width = read(torch.zeros(1, 8)).shape[1]
    trunk = Lambda(lambda own, x: own.second(read(own.first(x).relu())), first=first, second=nn.Linear(width, 5))
    assert not read(first(example).relu()).any()
    check_units(trunk, torch.cat([example, images(3).abs()]))


def as_complex(x):
    return torch.view_as_complex(x.unflatten(1, (-1, 2)))


@pytest.mark.parametrize("read_into_python", [False, True])
@pytest.mark.parametrize(
    "sizes", [lambda x: as_complex(x).abs(), lambda x: x.view(torch.int32)], ids=["absolute value", "bits"]
)
def test_channels_that_are_chosen_by_complex_numbers_or_bits_of_the_input(sizes, read_into_python):
    """Other inputs than the example read other channels, by an index or by a slice."""

    def forward(own, x):
        h, first = own.first(x).relu(), sizes(x).sum(0).argmax()
        return own.second(h[:, int(first) :][:, :3] if read_into_python else h[:, first + torch.arange(3)])

    torch.manual_seed(0)
    units = Units(Lambda(forward, first=nn.Linear(6, 8), second=nn.Linear(3, 5)), torch.randn(2, 6))
    inputs = [torch.randn(4, 6) for _ in range(20)]
    assert len({int(sizes(x).sum(0).argmax()) for x in inputs}) > 1, "inputs choose other channels"
    for x in inputs:
        gates = torch.rand(units.count) < 0.5
        masks = units.weight_masks(gates)
        changed = {n: torch.where(masks[n], p.detach(), p.detach() + 3) for n, p in units.trunk.named_parameters()}
        with torch.no_grad():
            assert torch.equal(units.run(x, gates), units.run(x, gates, changed))


@pytest.mark.parametrize(
    ("pool", "size"),
    [
        (nn.MaxPool1d(2), (8,)),
        (nn.AvgPool1d(2), (8,)),
        (nn.AdaptiveAvgPool1d(3), (8,)),
        (nn.AdaptiveMaxPool1d(3), (8,)),
        (nn.Upsample(scale_factor=2, mode="linear"), (4,)),
        (nn.ConstantPad1d(1, 0.0), (4,)),
        (nn.BatchNorm1d(4), (4,)),
        (nn.MaxPool3d(2), (4, 4, 4)),
        (nn.AvgPool3d(2), (4, 4, 4)),
        (nn.AdaptiveAvgPool3d(1), (4, 4, 4)),
        (nn.AdaptiveMaxPool3d(2), (4, 4, 4)),
        (nn.Upsample(scale_factor=2, mode="trilinear"), (2, 2, 2)),
        (nn.ReflectionPad3d(1), (2, 2, 2)),
        (nn.InstanceNorm3d(4), (4, 4, 4)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else f"{len(value)}-d",
)
def test_operations_in_other_dimensions(pool, size):
    kind = {1: nn.Conv1d, 3: nn.Conv3d}[len(size)]
    trunk = nn.Sequential(kind(2, 4, 1), copy.deepcopy(pool), kind(4, 3, 1), nn.Flatten())
    assert input_dependencies(check_units(trunk, images(2, *size)), "2") == EACH


def test_a_linear_layer_on_rows_of_vectors():
    """(batch, positions, channels): the last dimension holds the units, and a norm over positions has units of its own."""
    parts = {"first": nn.Linear(4, 5), "norm": nn.BatchNorm1d(3), "second": nn.Linear(15, 2)}
    trunk = Lambda(lambda own, x: own.second(own.norm(own.first(x)).relu().flatten(1)), **parts)
    units = check_units(trunk, images(3, 4))
    assert units.layers == {"first": slice(0, 5), "norm": slice(5, 8), "second": slice(8, 10)}
    assert input_dependencies(units, "second") == [{5 + k // 5} for k in range(15)]
    trunk = Lambda(
        lambda own, x: own.second(own.norm(own.first(x).mT).relu().flatten(1)), **parts | {"norm": nn.BatchNorm1d(5)}
    )
    assert input_dependencies(check_units(trunk, images(3, 4)), "second") == [{k // 3} for k in range(15)]


# Networks of several paths


def residual(shortcut, norm):
    """Return a trunk: stem, then conv, norm, relu, conv, norm plus a shortcut, then relu, mean and a linear layer."""
    parts = {"stem": nn.Conv2d(2, 4, 1), "one": nn.Conv2d(4, 4, 3, padding=1), "two": nn.Conv2d(4, 4, 3, padding=1)}
    norms = {f"norm{k}": norm(4) for k in (1, 2)}

    def forward(own, x):
        x = own.stem(x)
        return own.last((own.shortcut(x) + own.norm2(own.two(own.norm1(own.one(x)).relu()))).relu().mean((2, 3)))

    return Lambda(forward, **parts, **norms, shortcut=shortcut, last=nn.Linear(4, 3))


def test_shortcuts():
    """Units: stem 0 to 3, one 4 to 7, two 8 to 11."""
    plain = check_units(residual(nn.Identity(), nn.BatchNorm2d), images(2, 8, 8))
    assert input_dependencies(plain, "last") == [{k, 8 + k} for k in range(4)]
    assert input_dependencies(plain, "two") == [{4 + k} for k in range(4)]
    projected = check_units(residual(nn.Conv2d(4, 4, 1), nn.BatchNorm2d), images(2, 8, 8))
    assert list(projected.layers) == ["stem", "shortcut", "one", "two", "last"]
    assert input_dependencies(projected, "shortcut") == input_dependencies(projected, "one") == EACH
    assert input_dependencies(projected, "last") == [{4 + k, 12 + k} for k in range(4)]
    noughts = Lambda(lambda own, x: F.pad(x[:, :2], (0, 0, 0, 0, 1, 1)))
    padded = check_units(residual(noughts, nn.BatchNorm2d), images(2, 8, 8))
    assert input_dependencies(padded, "last") == [{8}, {0, 9}, {1, 10}, {11}]


def test_squeeze_and_excitation():
    """A channel that is multiplied by sigmoid(excitation) still depends on a single unit."""
    parts = {"first": nn.Conv2d(2, 4, 3), "down": nn.Linear(4, 2), "up": nn.Linear(2, 4), "last": nn.Linear(4, 3)}

    def forward(own, x):
        x = own.first(x).relu()
        factor = torch.sigmoid(own.up(own.down(x.mean((2, 3))).relu()))
        return own.last((x * factor[:, :, None, None]).mean((2, 3)))

    units = check_units(Lambda(forward, **parts), images(2, 8, 8))
    assert input_dependencies(units, "down") == EACH
    assert input_dependencies(units, "up") == [{4}, {5}]
    assert input_dependencies(units, "last") in (EACH, [{6 + k} for k in range(4)]), "either factor is correct"


def test_other_layouts_and_precisions():
    x = images(2, 8, 8)
    last = residual(nn.Identity(), nn.BatchNorm2d).to(memory_format=torch.channels_last)
    assert input_dependencies(check_units(last, x.to(memory_format=torch.channels_last)), "last") == [
        {k, 8 + k} for k in range(4)
    ]
    assert input_dependencies(check_units(between_layers(nn.ReLU()).double(), x.double()), "second") == EACH
    assert input_dependencies(check_units(between_layers(nn.ReLU()).bfloat16(), x.bfloat16()), "second") == EACH


def test_every_kind_of_norm_in_a_residual_network():
    for norm in (nn.BatchNorm2d, nn.InstanceNorm2d, lambda c: nn.GroupNorm(2, c), lambda c: nn.RMSNorm([c, 8, 8])):
        check_units(residual(nn.Identity(), norm), images(2, 8, 8))


# Parameters that several layers use, or that are copied, sliced or shared


def test_a_layer_called_twice_is_masked_for_both_calls():
    layer = nn.Linear(3, 3)
    units = check_units(nn.Sequential(nn.Linear(2, 3), layer, nn.ReLU(), layer), images(2))
    assert units.layers == {"0": slice(0, 3), "1": slice(3, 6)}, "the same units at both calls"
    values = torch.zeros(6)
    values[[0, 4]] = 1  # unit 4 reads unit 0 at the first call, and itself at the second
    assert units.weight_masks(values)["1.weight"].nonzero().tolist() == [[1, 0], [1, 1]]
    values[[0, 5]] = torch.tensor([0.0, 1.0])  # now the first call reads nothing that is used
    assert units.weight_masks(values)["1.weight"].nonzero().tolist() == [[1, 1], [1, 2], [2, 1], [2, 2]]
    assert units.weight_masks(values)["1.bias"].tolist() == [0, 1, 1]


def test_tied_weights():
    """A decoder with the transposed weights of its encoder: the union of both uses."""
    trunk = Lambda(lambda own, x: F.linear(own.code(x).relu(), own.code.weight.T), code=nn.Linear(4, 3))
    units = check_units(trunk, images(4))
    assert units.layers == {"code": slice(0, 3), "linear()": slice(3, 7)}
    values = torch.zeros(7)
    values[[1, 5]] = 1
    assert units.weight_masks(values)["code.weight"].nonzero().tolist() == [[1, 0], [1, 1], [1, 2], [1, 3]]
    values[0], values[1] = 0, 0
    assert not units.weight_masks(values)["code.weight"].any(), "unit 5 reads no unit that is used"
    trunk = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    trunk[2].weight = trunk[0].weight  # one parameter in two modules
    units = check_units(trunk, images(4))
    assert units.layers == {"0": slice(0, 4)}
    masks = units.weight_masks(torch.tensor([0.0, 0.0, 1.0, 0.0]))
    assert masks["0.weight"].nonzero().tolist() == [[2, 0], [2, 1], [2, 2], [2, 3]], "the first call reads the images"
    assert masks["2.bias"].tolist() == masks["0.bias"].tolist() == [0, 0, 1, 0]


def test_slices_and_copies_of_weights():
    """Elements are traced through slices and copies; elements that nothing used on the example are frozen, to be safe."""
    table = nn.Parameter(torch.randn(6, 4))
    trunk = Lambda(lambda own, x: F.linear(F.linear(x, own.table[:3]).relu(), own.table[3:5, [2, 0, 1]]), table=table)
    units = check_units(trunk, images(4))
    values = torch.zeros(5)
    values[[1, 4]] = 1
    expected = torch.zeros(6, 4)
    expected[1] = 1  # unit 1 reads the images
    expected[4, 0] = 1  # unit 4 reads unit 1 through column [2, 0, 1][1]
    expected[3:5, 3] = 1
    expected[5] = 1
    assert torch.equal(units.weight_masks(values)["table"], expected)
    both = {"one": nn.Linear(4, 2), "two": nn.Linear(4, 3), "last": nn.Linear(5, 2)}
    joined = Lambda(lambda own, x: own.last(F.linear(x, torch.cat([own.one.weight, own.two.weight])).relu()), **both)
    units = check_units(joined, images(4))
    values = torch.zeros(7)
    values[[0, 3]] = 1
    masks = units.weight_masks(values)
    assert masks["one.weight"][:, 0].tolist() == [1, 0]
    assert masks["two.weight"][:, 0].tolist() == [0, 1, 0]
    assert not units.frozen_entirely


def test_negatives_and_rotations_of_weights():
    parts = {"w": nn.Parameter(torch.randn(3, 4)), "last": nn.Linear(6, 2)}
    trunk = Lambda(lambda own, x: own.last(F.linear(x, torch.cat([own.w, -own.w])).relu()), **parts)
    units = check_units(trunk, images(4))
    values = torch.zeros(8)
    values[[0, 4]] = 1
    assert units.weight_masks(values)["w"][:, 0].tolist() == [1, 1, 0], "unit 4 is written by the negative of row 1"
    square = {"w": nn.Parameter(torch.randn(2, 3, 3, 3)), "last": nn.Conv2d(4, 2, 1)}
    turned = Lambda(
        lambda own, x: own.last(F.conv2d(x, torch.cat([own.w, torch.rot90(own.w, 1, (2, 3))]))).flatten(1), **square
    )
    units = check_units(turned, images(3, 4, 4))
    assert not units.frozen_entirely
    assert units.weight_masks(torch.tensor([0.0, 0, 0, 1, 0, 0]))["w"][:, 0, 0, 0].tolist() == [0, 1]


def test_real_numbers_that_are_seen_as_complex_ones_are_held_whole_with_that_reason():
    parts = {"w": nn.Parameter(torch.randn(4, 4, 2)), "one": nn.Linear(4, 4)}
    trunk = Lambda(lambda own, x: (own.one(x).to(torch.cfloat) @ torch.view_as_complex(own.w)).real, **parts)
    assert check_units(trunk, images(4)).held_whole() == {"w": "view_as_complex"}


def test_parameters_that_share_a_storage():
    flat = torch.randn(3 * 4 + 2 * 3)
    trunk = nn.Sequential(nn.Linear(4, 3, bias=False), nn.ReLU(), nn.Linear(3, 2, bias=False))
    trunk[0].weight, trunk[2].weight = nn.Parameter(flat[:12].view(3, 4)), nn.Parameter(flat[12:].view(2, 3))
    units, plain = (
        check_units(trunk, images(4)),
        Units(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), images(4)),
    )
    values = torch.rand(5)
    for name in ("0.weight", "2.weight"):
        assert torch.equal(units.weight_masks(values)[name], plain.weight_masks(values)[name])
    trunk[2].weight = nn.Parameter(flat[2:8].view(2, 3))  # now they overlap
    tasks = toy_tasks(2, shape=(4,))
    hat = HAT(Network(trunk, [3, 3], tasks[0].train.inputs(torch.arange(2))))
    learn(hat, tasks[:1])
    first = logits(hat, tasks[0])
    learn(hat, tasks[1:], Trainer(Regime(epochs=4, batch=16, optimizer="adamw", lr=0.1)))
    assert torch.equal(first, logits(hat, tasks[0]))
    assert first.std() > 0


def test_a_branch_that_the_example_did_not_take():
    """Weights that only other inputs use are frozen; a layer that only other inputs call is an error."""
    bank = nn.Parameter(torch.randn(2, 3, 4))
    trunk = Lambda(lambda own, x: own.last(F.linear(x, own.bank[int(x.sum() > 0)]).relu()), bank=bank, last=nn.Linear(3, 2))
    for sign, held in ((1, [1, 0]), (-1, [0, 1])):
        masks = Units(trunk, sign * torch.ones(2, 4)).weight_masks(torch.zeros(5))
        assert masks["bank"].flatten(1).amin(1).tolist() == masks["bank"].flatten(1).amax(1).tolist() == held
    branches = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
    trunk = Lambda(lambda own, x: own.branches[int(x.sum() > 0)](x), branches=branches)
    with pytest.raises(ValueError, match=r"branches\.1\.weight \(call 1\).*example"):
        Units(trunk, -torch.ones(2, 4)).run(torch.ones(2, 4), torch.ones(3))


# What cannot be traced


@pytest.mark.parametrize("name", UNTRACEABLE)
def test_untraceable_parameters_are_frozen_entirely_or_named_in_an_error(name):
    part, parameter = UNTRACEABLE[name]
    units = check_units(trunk_around(part), images(3, 5))
    assert any(held.startswith(f"2.{parameter}") for held in units.frozen_entirely)
    assert all((units.weight_masks(torch.zeros(units.count))[held] == 1).all() for held in units.frozen_entirely)
    assert not any(held.startswith(("0.", "5.")) for held in units.frozen_entirely), "the layers around it are traced"
    with pytest.raises(ValueError, match=rf"2\.{parameter}.* \(\w+\) is used by \w+.*leave=.2\.{parameter}"):
        Units(trunk_around(part), images(3, 5), on_unknown="error")
    left = Units(trunk_around(part), images(3, 5), on_unknown="error", leave="2.*")
    assert set(units.frozen_entirely) <= set(left.frozen_entirely)


@pytest.mark.parametrize("name", FOLLOWED)
def test_parameters_that_have_gates_or_are_kept_per_task(name, monkeypatch):
    monkeypatch.setattr("torch.backends.mha._is_fastpath_enabled", False)  # it is never used within a mode
    part, parameter = FOLLOWED[name]
    units = check_units(trunk_around(part), images(3, 5), on_unknown="error")
    assert units.frozen_entirely == units.held_whole() == {}
    own = {layer for layer in units.layers if layer.startswith(f"2.{parameter}")}
    assert own or any(held.startswith(f"2.{parameter}") for held in units.per_task)
    assert len(Units(trunk_around(part), images(3, 5), leave="2.*").frozen_entirely) == len(list(part.parameters()))


def test_parts_left_out_by_pattern():
    trunk = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    units = check_units(trunk, images(3), leave="0.*, 2.weight")
    assert set(units.frozen_entirely) == {"0.weight", "0.bias", "2.weight"}
    assert units.frozen_entirely["2.weight"] == "left out by '2.weight'"
    assert set(Units(trunk, images(3), leave="4").frozen_entirely) == {"4.weight", "4.bias"}, (
        "a module with all its parameters"
    )
    with pytest.raises(ValueError, match=r"leave='5\.\*' matches no parameter"):
        Units(trunk, images(3), leave="5.*")
    assert Units(trunk, images(3)).frozen_entirely == {}


def test_an_untraceable_module_that_is_not_trained_is_no_error():
    trunk = trunk_around(UNTRACEABLE["spectral norm"][0])
    trunk[2].requires_grad_(False)
    assert Units(trunk, images(3, 5), on_unknown="error").count == 12


def test_a_trunk_without_layers():
    with pytest.raises(ValueError, match=r"no linear, .* layer"):
        Units(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(12)), images(3, 4))


def test_a_trunk_that_returns_a_tuple_in_training_is_refused():
    trunk = Lambda(lambda own, x: (own.layer(x), x) if own.training else own.layer(x), layer=nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"training mode.*tensor.*not tuple"):
        Units(trunk, images(3))


def test_a_parameter_without_elements():
    trunk = Lambda(lambda own, x: own.layer(x), layer=nn.Linear(3, 2), nothing=nn.Parameter(torch.empty(0)))
    assert check_units(trunk, images(3)).weight_masks(torch.ones(2))["nothing"].shape == (0,)


def test_layers_by_function_have_names_of_their_own():
    """A module may be called linear, and a layer without a module too."""
    trunk = Lambda(
        lambda own, x: own.linear(F.linear(x, own.w.T)), w=nn.Parameter(torch.randn(3, 4)), linear=nn.Linear(4, 2)
    )
    assert Units(trunk, images(3)).layers == {"linear()": slice(0, 4), "linear": slice(4, 6)}


# Known pitfalls, one by one


def test_pitfall_the_gate_is_applied_behind_a_batch_norm():
    """A gate only in front would let the norm's bias through; a gate also in front would get hardly any gradient."""
    trunk = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 2)).eval()
    nn.init.normal_(trunk[1].bias)
    units, x = check_units(trunk, images(2, 8, 8)), images(2, 8, 8)
    assert units.gates["0.weight", 1] is None
    gates = torch.tensor([1.0, 0.5, 0.0, 0.25, 1.0, 1.0])
    expected = trunk[3]((trunk[1](trunk[0](x)) * gates[:4, None, None]).flatten(1))
    torch.testing.assert_close(units.run(x, gates), expected)


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 4), nn.LayerNorm([4, 6, 6]), nn.RMSNorm([4, 6, 6])])
def test_pitfall_norms_that_mix_units_are_gated_in_front_and_behind(norm):
    trunk = nn.Sequential(nn.Conv2d(2, 4, 3), copy.deepcopy(norm), nn.Flatten(), nn.Linear(4 * 36, 2)).eval()
    for p in trunk[1].parameters():
        nn.init.normal_(p)
    units, x = check_units(trunk, images(2, 8, 8)), images(2, 8, 8)
    gates = torch.tensor([1.0, 0.5, 0.0, 0.25, 1.0, 1.0])
    gate = gates[:4, None, None]
    torch.testing.assert_close(units.run(x, gates), trunk[3]((trunk[1](trunk[0](x) * gate) * gate).flatten(1)))


def preactivated():
    parts = {"one": nn.Conv2d(2, 4, 3, padding=1), "two": nn.Conv2d(4, 4, 3, padding=1), "norm": nn.BatchNorm2d(4)}

    def forward(own, x):
        x = own.one(x)
        return own.last(own.norm(x + own.two(x.relu())).relu().mean((2, 3)))

    trunk = Lambda(forward, **parts, last=nn.Linear(4, 3))
    nn.init.normal_(trunk.norm.bias)
    return trunk.eval()


def test_pitfall_a_norm_on_a_sum_has_gates_of_its_own():
    """Its bias makes a channel non-zero although all units that feed it are closed."""
    units = check_units(preactivated(), images(2, 8, 8))
    assert units.layers == {"one": slice(0, 4), "two": slice(4, 8), "norm": slice(8, 12), "last": slice(12, 15)}
    assert input_dependencies(units, "last") == [{8 + k} for k in range(4)]
    gates = torch.ones(15)
    gates[8:12] = 0
    torch.testing.assert_close(units.run(images(2, 8, 8), gates), units.trunk.last.bias.expand(5, 3))


def test_pitfall_after_a_concatenation_the_same_gates_are_applied_again():
    parts = {"one": nn.Conv2d(2, 3, 1), "two": nn.Conv2d(2, 2, 1), "norm": nn.BatchNorm2d(5), "last": nn.Linear(5, 3)}
    trunk = Lambda(lambda own, x: own.last(own.norm(torch.cat([own.two(x), own.one(x)], 1)).mean((2, 3))), **parts)
    nn.init.normal_(trunk.norm.bias)
    units = check_units(trunk, images(2, 8, 8))
    assert units.layers == {"two": slice(0, 2), "one": slice(2, 5), "last": slice(5, 8)}
    assert units.gates["norm.weight", 1].units.tolist() == [0, 1, 2, 3, 4]
    gates = torch.ones(8)
    gates[:5] = 0
    torch.testing.assert_close(units.run(images(2, 8, 8), gates), trunk.last.bias.expand(5, 3))


def test_pitfall_a_second_reader_besides_the_norm_needs_a_gate_of_its_own():
    parts = {"one": nn.Conv2d(2, 4, 1), "norm": nn.BatchNorm2d(4), "last": nn.Linear(4, 3)}

    def forward(own, x):
        x = own.one(x)
        return own.last((own.norm(x) + x.tanh()).mean((2, 3)))

    units = check_units(Lambda(forward, **parts), images(2, 8, 8))
    assert units.gates["one.weight", 1] is not None
    assert input_dependencies(units, "last") == EACH


def test_pitfall_the_features_themselves_are_a_second_reader():
    def forward(own, x):
        x = own.one(x)
        own.norm(x)  # its result is not used
        return x

    units = check_units(Lambda(forward, one=nn.Linear(3, 4), norm=nn.BatchNorm1d(4)), images(3))
    assert units.gates["one.weight", 1] is not None


def test_pitfall_a_function_with_f_of_0_not_0_is_gated_again():
    trunk = nn.Sequential(nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 2))
    units = check_units(trunk, images(3))
    gates = torch.tensor([1.0, 0.0, 0.5, 1.0, 1.0, 1.0])
    expected = trunk[2](F.softplus(trunk[0](images(3)) * gates[:4]) * gates[:4])
    torch.testing.assert_close(units.run(images(3), gates), expected)


def test_pitfall_zero_times_infinity():
    """Gates that multiply turn an infinity into nan; gates that select (bool) do not."""
    trunk = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    units = Units(trunk, images(3))
    gates = torch.tensor([True, False, True, True, True, True])
    with torch.no_grad():
        before = units.run(images(3), gates)
        trunk[0].weight[1] = torch.inf
        assert torch.equal(units.run(images(3), gates), before)
        assert units.run(images(3), gates.float()).isnan().any()


@pytest.mark.filterwarnings("ignore:.* held whole after the first task")
def test_pitfall_buffers_that_training_writes_are_per_task():
    trunk = nn.Sequential(nn.Flatten(), spectral_norm(nn.Linear(16, 8)), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))
    tasks = toy_tasks(2)
    net = Network(trunk, [3, 3], tasks[0].train.inputs(torch.arange(2)))
    assert {name.rpartition(".")[2] for name in own_tensors(net)} == {
        "_u", "_v", "weight", "bias", "running_mean", "running_var", "num_batches_tracked",
    }  # fmt: skip
    hat = HAT(net)
    learn(hat, tasks[:1])
    first = logits(hat, tasks[0])
    learn(hat, tasks[1:])
    assert torch.equal(first, logits(hat, tasks[0]))
    assert first.std() > 0


class Follower(nn.Module):
    """A layer, and a frozen copy of it that follows it as a moving average."""

    def __init__(self):
        super().__init__()
        self.own = nn.Linear(16, 12)
        self.mean = copy.deepcopy(self.own).requires_grad_(False)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                for old, new in zip(self.mean.parameters(), self.own.parameters(), strict=True):
                    old.lerp_(new, 0.2)
        return torch.relu(self.own(x.flatten(1))) + torch.relu(self.mean(x.flatten(1)))


@pytest.mark.parametrize("name", ["hat", "pmask", "packnet"])
def test_pitfall_frozen_parameters_that_training_writes_are_per_task(name):
    tasks = toy_tasks(3)
    with seeded(0, "weights"):
        net = Network(Follower(), tasks=tasks)
    method, answers = METHODS[name](net), []
    for task in tasks:
        learn(method, [task])
        answers.append(logits(method, task))
    assert all(torch.equal(logits(method, task), then) for task, then in zip(tasks, answers, strict=True))
    means = [net.trunk.mean.weight, *(method.norms.of(task)["mean.weight"] for task in (1, 2))]
    assert len({mean.sum().item() for mean in means}) == 3
    assert not any(mean.requires_grad for mean in means)


@pytest.mark.parametrize("reentrant", [True, False])
def test_pitfall_gradient_checkpointing_is_refused(reentrant):
    parts = {"one": nn.Linear(3, 4), "two": nn.Linear(4, 4)}
    trunk = Lambda(lambda own, x: checkpoint(own.two, own.one(x), use_reentrant=reentrant), **parts)
    with pytest.raises(ValueError, match=r"gradient checkpointing.*; pmask and packnet"):
        Units(trunk, images(3))


class Experts(nn.Module):
    """Each image goes to one of two linear layers; the example of `toy_tasks` need not have images for both."""

    def __init__(self, checkpointed):
        super().__init__()
        self.each, self.checkpointed = nn.ModuleList(nn.Linear(16, 12) for _ in range(2)), checkpointed

    def forward(self, x):
        x = x.flatten(1)
        chosen = (torch.ones_like(x[:, 0]) if self.checkpointed else x[:, 0] > x[:, 0].median()).long()
        out = x.new_zeros(len(x), 12)
        for number, each in enumerate(self.each):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                part = checkpoint(each, x[rows], use_reentrant=False) if self.checkpointed else each(x[rows])
                out = out.index_add(0, rows, part.relu())
        return out


@pytest.mark.filterwarnings("ignore:.* held whole after the first task", "ignore:the trunk reads values")
@pytest.mark.parametrize("checkpointed", [True, False])
def test_methods_that_mask_single_weights_take_what_the_refusal_says(checkpointed):
    tasks = toy_tasks(2)
    example = tasks[0].train.inputs(torch.zeros(2, dtype=torch.long))  # twice the same: one expert
    said = "cannot be traced" if checkpointed else "all inputs must take the same path"
    with pytest.raises(ValueError, match=f"{said}; pmask and packnet, whose masks are of single weights, take such a trunk"):
        HAT(Network(Experts(checkpointed), [3, 3], example)).eval()(tasks[0].test.x, 0)
    for kind in (PMASK, PackNet):
        method = kind(Network(Experts(checkpointed), [3, 3], example))
        method.learn(tasks[0], Trainer(FIRM))
        before = logits(method, tasks[0])
        method.learn(tasks[1], Trainer(FIRM))
        assert torch.equal(logits(method, tasks[0]), before)


def test_pitfall_a_forward_pass_that_differs_in_training_is_refused():
    parts = {"one": nn.Linear(16, 4), "two": nn.Linear(4, 4)}
    trunk = Lambda(lambda own, x: own.two(own.one(x.flatten(1))) if own.training else own.one(x.flatten(1)), **parts)
    with pytest.raises(ValueError, match=r"two\.weight \(call 1\).*example"):
        HAT(Network(trunk, [3], toy_tasks(1)[0].train.inputs(torch.arange(2))))


def test_pitfall_check_units_can_fail(monkeypatch):
    trunk, x = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4)), images(3)
    with pytest.raises(AssertionError, match="constant"):
        check_units(nn.Sequential(nn.Linear(3, 6), as_module(lambda x: 0 * x), nn.Linear(6, 4)), x)
    masks = Units.weight_masks
    monkeypatch.setattr(Units, "weight_masks", lambda units, values: {n: 0 * t for n, t in masks(units, values).items()})
    monkeypatch.setattr(Units, "_check", lambda *args: None)
    with pytest.raises(AssertionError, match="has a gradient"):
        check_units(trunk, x)


# Errors in the rules are found when units are constructed


def test_sets_of_sums_and_products():
    dependencies = DependencySets()
    one, two = dependencies.id_of(frozenset([1])), dependencies.id_of(frozenset([2, 3]))
    a = torch.tensor([one, one, one, ALWAYS_ZERO, ALWAYS_ZERO])
    b = torch.tensor([two, ALWAYS_ACTIVE, ALWAYS_ZERO, ALWAYS_ACTIVE, ALWAYS_ZERO])

    def sets(ids):
        return [dependencies.sets[k] for k in ids]

    assert sets(dependencies.union(a, b)) == [{1, 2, 3}, None, {1}, None, set()]
    assert sets(dependencies.smaller(a, b)) == [{1}, {1}, set(), set(), set()]
    assert sets(dependencies.reduce(torch.stack([a, b]), [0])[0]) == [{1, 2, 3}, None, {1}, None, set()]


def sums_take_the_smaller_set(monkeypatch):
    monkeypatch.setattr(DependencySets, "_union", DependencySets._smaller)
    return residual(nn.Identity(), nn.BatchNorm2d)


def products_are_always_zero(monkeypatch):
    monkeypatch.setattr(DependencySets, "_smaller", lambda dependencies, a, b: ALWAYS_ZERO)
    return between_layers(as_module(lambda x: x * x.mean()))


def norms_without_gates(monkeypatch):
    final_gates = Trace.final_gates

    def without(trace, x):
        return {key: None if "norm" in key[0] else gate for key, gate in final_gates(trace, x).items()}

    monkeypatch.setattr(Trace, "final_gates", without)
    return preactivated()


def every_function_maps_zero_to_zero(monkeypatch):
    monkeypatch.setattr("hatrack.tracing.rules.pointwise_ids", lambda op: op.ids(op.floats[0]))
    return between_layers(as_module(lambda x: x + 1))


def every_reader_is_a_norm(monkeypatch):
    monkeypatch.setattr(Trace, "final_gates", lambda trace, x: {
        key: None if any(key == layer[2] for layer in trace.readers.values()) else gate for key, gate in trace.places.items()
    })  # fmt: skip
    return between_layers(nn.GroupNorm(2, 4))


def gates_of_other_units(monkeypatch):
    values = Gate.values
    monkeypatch.setattr(Gate, "values", lambda gate, gates: values(gate, gates.roll(1)))
    return between_layers(nn.ReLU())


def biases_are_not_recorded(monkeypatch):
    record_use = Trace.record_use

    def skip(trace, positions, writes, reads):
        if positions.dim() > 1:
            record_use(trace, positions, writes, reads)

    monkeypatch.setattr(Trace, "record_use", skip)
    monkeypatch.setattr("hatrack.tracing.units._unused", lambda uses, total: torch.zeros(total))
    return between_layers(nn.ReLU())


SABOTAGE = [
    sums_take_the_smaller_set, products_are_always_zero, norms_without_gates, every_function_maps_zero_to_zero,
    every_reader_is_a_norm, gates_of_other_units, biases_are_not_recorded,
]  # fmt: skip


@pytest.mark.parametrize("sabotage", SABOTAGE, ids=lambda function: function.__name__)
def test_a_broken_rule_is_found_at_construction(sabotage):
    with pytest.MonkeyPatch.context() as monkeypatch:
        trunk = sabotage(monkeypatch)
        with pytest.raises(ValueError, match=r"not traced correctly: .*leave="):
            Units(trunk, images(2, 8, 8))
    Units(trunk, images(2, 8, 8))


# A classifier whose last layer is replaced by heads


def convolutional_classifier():
    """Return a classifier whose last layer is a convolution, followed by a ReLU and a pool."""
    end = [nn.Conv2d(6, 5, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Dropout(), *end)


def test_a_classifier_with_a_linear_head():
    parts = {"body": nn.Sequential(nn.Flatten(), nn.Linear(16, 7), nn.ReLU()), "fc": nn.Linear(7, 5)}
    model = Lambda(lambda own, x: own.fc(own.body(x)), **parts)
    net = Network.from_classifier(model, [3, 2], images(1, 4, 4))
    assert net.features == 7
    assert isinstance(model.fc, nn.Linear), "the given model is not changed"
    assert torch.equal(net.trunk(images(1, 4, 4)), model.body(images(1, 4, 4)))
    assert [head.out_features for head in net.heads] == [3, 2]


def test_a_classifier_with_a_convolution_as_its_head():
    model = convolutional_classifier().eval()
    net = Network.from_classifier(model, [3], images(1, 4, 4))
    assert net.features == 6
    expected = model[0](images(1, 4, 4)).relu().mean((2, 3))
    torch.testing.assert_close(net.trunk.eval()(images(1, 4, 4)), expected)


def test_a_classifier_whose_outputs_are_no_layer_s_units():
    body = [nn.Flatten(), nn.Linear(16, 5)]
    for end in (
        nn.LogSoftmax(1),
        as_module(lambda x: x.flip(1)),
        as_module(lambda x: x[:, :4]),
        as_module(lambda x: torch.cat([x, x], 1)),
    ):
        with pytest.raises(ValueError, match="no layer's units are the outputs"):
            Network.from_classifier(nn.Sequential(*body, end), [3], images(1, 4, 4))


# HAT on networks that have norms


def normed(width=16):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, width, 3), nn.GroupNorm(2, width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


def make(tasks, *, width=16, known=None, **options):
    trunk = normed(width)
    return HAT(Network(trunk, [t.classes for t in tasks[:known]], tasks[0].train.inputs(torch.arange(2))), **options)


FIRM = Regime(epochs=4, batch=16, lr=0.05, optimizer="adamw", weight_decay=0.1)


def test_norms_per_task_forget_nothing_and_shared_ones_do():
    tasks = toy_tasks(3)
    changes = {}
    for norms in ("task", "shared"):
        hat = make(tasks, norms=norms)
        hat.learn(tasks[0], Trainer(FIRM))
        first = logits(hat, tasks[0])
        learn(hat, tasks[1:], Trainer(FIRM))
        changes[norms] = (first - logits(hat, tasks[0])).abs().max().item()
        assert first.std(0).min() > 0
    assert changes["task"] == 0 < changes["shared"]


def test_a_released_task_is_like_a_task_never_learned():
    tasks = toy_tasks(3)
    hat, fresh = make(tasks), make(tasks)
    learn(hat, tasks[:2], Trainer(FIRM))
    before = [logits(hat, task) for task in tasks[:2]]
    hat.release(0)
    assert torch.equal(logits(hat, tasks[1]), before[1])
    assert not torch.equal(logits(hat, tasks[0]), before[0])
    fresh.net.trunk.load_state_dict(hat.net.trunk.state_dict())
    assert torch.equal(logits(hat, tasks[0]), logits(fresh, tasks[0])), "gates, norms and head are reset"
    with pytest.raises(IndexError, match="no task 3"):
        hat.release(3)


def test_released_units_can_be_used_again():
    tasks = toy_tasks(3)
    hat = make(tasks)
    learn(hat, tasks[:2], Trainer(FIRM))
    only_first = hat.gates[0] & ~hat.gates[1]
    assert only_first.any()
    used = hat.usage()
    hat.release(0)
    assert sum(hat.usage().values()) < sum(used.values())
    kept, second = hat.net.trunk[0].weight.detach().clone(), logits(hat, tasks[1])
    hat.learn(tasks[2], Trainer(FIRM))
    moved = (hat.net.trunk[0].weight != kept).flatten(1).any(1)
    assert moved[only_first[:16]].all(), "the weights of units that only the released task used are free"
    assert not moved[hat.gates[1][:16]].any()
    assert torch.equal(logits(hat, tasks[1]), second)


def test_learning_a_task_again_does_not_change_the_others():
    tasks, others = toy_tasks(3), toy_tasks(3, seed=5)
    hat = make(tasks)
    learn(hat, tasks, Trainer(FIRM))
    before = [logits(hat, task) for task in tasks]
    hat.learn(others[1], Trainer(FIRM))
    assert torch.equal(logits(hat, tasks[0]), before[0])
    assert torch.equal(logits(hat, tasks[2]), before[2])
    assert not torch.equal(logits(hat, tasks[1]), before[1])
    assert hat.done.tolist() == [True] * 3


def test_a_warning_names_layers_without_free_units():
    tasks = toy_tasks(2)
    hat = make(tasks)
    learn(hat, tasks[:1])
    hat.gates[0] = True
    hat.gates[0, 16:20] = False
    first = logits(hat, tasks[0])
    with pytest.warns(UserWarning, match=r"task 'toy 1' finds under 5% free in 1 of 2 layers: 0 \(0%\)"):
        learn(hat, tasks[1:])
    assert torch.equal(first, logits(hat, tasks[0]))


def test_a_layer_without_open_units_returns_zeros():
    tasks = toy_tasks(2)
    hat = make(tasks)
    learn(hat, tasks[:1])
    hat.gates[0, :16] = False
    features = hat.units.run(images(1, 4, 4), hat.gates[0])
    assert (features[:, ~hat.gates[0, 16:]] == 0).all()
    assert logits(hat, tasks[0]).isfinite().all()
    hat.gates[0] = False
    assert torch.equal(logits(hat, tasks[0]), hat.net.heads[0].bias.detach().expand(len(tasks[0].test), 3))
    learn(hat, tasks[1:])
    assert torch.equal(logits(hat, tasks[0]), hat.net.heads[0].bias.detach().expand(len(tasks[0].test), 3))


def test_a_batch_that_mixes_tasks_takes_the_norms_of_each():
    tasks = toy_tasks(3)
    hat = make(tasks, known=2)
    hat.net.add_task(3)
    learn(hat, tasks, Trainer(FIRM))
    owner = torch.tensor([2, 0, 1, 1, 0, 2, 2])
    x = torch.cat([tasks[k].test.inputs(torch.tensor([i])) for i, k in enumerate(owner.tolist())])
    with torch.no_grad():
        mixed, single = hat.eval()(x, owner), torch.stack([hat(x, k) for k in range(3)])
    torch.testing.assert_close(mixed, single[owner, torch.arange(7)])
    assert (single[0] - single[1]).abs().min() > 0
    assert not torch.equal(hat.norms.of(1)["1.running_mean"], hat.norms.of(2)["1.running_mean"])
